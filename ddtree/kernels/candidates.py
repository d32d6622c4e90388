"""The drafter's candidates: top-K and log-sum-exp of every row in one pass over the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.kernels.checks import check, check_logits, power_of_two, warps
from ddtree.kernels.gumbel import gumbel, key_value, noise_bits, noise_key, pack
from ddtree.kernels.lazy import Arg, constexpr, kernel, tl
from ddtree.kernels.sampling import COLDEST

MAX_COUNT = 512
"""The largest K: all candidates that a budget of 511 can use."""
MERGED = 8192
"""Entries that one program merges at most: the best K of several parts of a row."""


@kernel
def _divisor(temperature: Arg, coldest: Arg) -> Arg:
    return tl.maximum(tl.where(temperature > 0, temperature, 1.0), coldest)


@kernel
def _store_best(keys: Arg, count: Arg, best: Arg) -> None:
    """Store the `count` largest of the distinct int64 `keys` at `best`, in the order they have."""
    low, high = tl.min(keys, 0), tl.max(keys, 0) + 1
    found = tl.sum((keys >= low).to(tl.int32), 0)
    while found > count:
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        above = tl.sum((keys >= middle).to(tl.int32), 0)
        enough = above >= count
        low, found = tl.where(enough, middle, low), tl.where(enough, above, found)
        high = tl.where(enough, high, middle)
    kept = keys >= low
    tl.store(best + tl.cumsum(kept.to(tl.int32), 0) - 1, keys, mask=kept)


@kernel
def _part(
    logits: Arg,
    vocab: Arg,
    first_id: Arg,
    depths: Arg,
    count: Arg,
    temperature: Arg,
    coldest: Arg,
    seeds: Arg,
    positions: Arg,
    alpha: Arg,
    tops: Arg,
    maxima: Arg,
    sums: Arg,
    TEMPERED: constexpr,
    COUPLED: constexpr,
    BLOCK: constexpr,
) -> None:
    row = tl.program_id(0)
    part = row * tl.num_programs(1) + tl.program_id(1)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * vocab + ids, mask=ids < vocab, other=float("-inf"))
    x = tl.where(x == x, x.to(tl.float32), float("-inf"))  # NaN has no place in an order
    divisor = 1.0
    if TEMPERED:
        divisor = _divisor(tl.load(temperature + row // depths), coldest)
    tempered = x / divisor
    largest = tl.max(tempered, 0)
    origin = tl.where(largest > float("-inf"), largest, 0.0)
    tl.store(maxima + part, largest)
    tl.store(sums + part, tl.sum(tl.exp(tempered - origin), 0))
    scores = x
    if COUPLED:
        heat = tl.load(temperature + row // depths)
        scores = x * tl.load(alpha + row % depths)
        if heat > 0:
            low, high = noise_key(tl.load(seeds + row // depths), tl.load(positions + row))
            scores += heat * gumbel(noise_bits(ids + first_id, low, high))
    # Places beyond the vocabulary are -inf, and after every token by their ids.
    _store_best(pack(scores, ids + first_id), count, tops + part.to(tl.int64) * count)


@kernel
def _merge(tops: Arg, entries: Arg, group: Arg, count: Arg, best: Arg, GROUP: constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, GROUP)
    known = (place < group) & (tl.program_id(1) * group + place < entries)
    start = row * entries + tl.program_id(1) * group
    keys = tl.load(tops + start + place, mask=known, other=0)
    keys = tl.where(known, keys, place.to(tl.int64) - 0x7FFFFFFFFFFFFFFF)
    _store_best(keys, count, best + (row * tl.num_programs(1) + tl.program_id(1)) * count)


@kernel
def _rank(
    logits: Arg,
    vocab: Arg,
    depths: Arg,
    count: Arg,
    temperature: Arg,
    coldest: Arg,
    scale: Arg,
    best: Arg,
    maxima: Arg,
    sums: Arg,
    parts: Arg,
    ids: Arg,
    weights: Arg,
    TEMPERED: constexpr,
    COUPLED: constexpr,
    KEPT: constexpr,
    PARTS: constexpr,
    TILE: constexpr,
) -> None:
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    largest = tl.load(maxima + row * parts + part, mask=part < parts, other=float("-inf"))
    share = tl.load(sums + row * parts + part, mask=part < parts, other=0.0)
    most = tl.max(largest, 0)
    origin = tl.where(most > float("-inf"), most, 0.0)
    total = origin + tl.log(tl.sum(share * tl.exp(largest - origin), 0))

    place = tl.arange(0, KEPT)
    kept = place < count
    out = row.to(tl.int64) * count
    keys = tl.load(best + out + place, mask=kept, other=-0x7FFFFFFFFFFFFFFF)
    rank = tl.zeros([KEPT], tl.int32)
    for start in range(0, count, TILE):
        other = start + tl.arange(0, TILE)
        others = tl.load(best + out + other, mask=other < count, other=-0x7FFFFFFFFFFFFFFF)
        rank += tl.sum((others[None, :] > keys[:, None]).to(tl.int32), 1)
    token = 0xFFFFFFFF - (keys & 0xFFFFFFFF)
    score = key_value((keys >> 32).to(tl.int32))
    divisor = 1.0
    if TEMPERED:
        divisor = _divisor(tl.load(temperature + row // depths), coldest)
    weight = score / divisor - total
    if COUPLED:
        x = tl.load(logits + row.to(tl.int64) * vocab + token, mask=kept, other=0.0)
        weight = x.to(tl.float32) - total
        heat = tl.load(temperature + row // depths)
        if heat > 0:
            top = tl.max(tl.where(kept, score, float("-inf")), 0)
            spread = (score - top) / (_divisor(heat, coldest) * tl.load(scale + row % depths))
            weight = spread - tl.log(tl.sum(tl.where(kept, tl.exp(spread), 0.0), 0))
    tl.store(ids + out + rank, token, mask=kept)
    tl.store(weights + out + rank, weight, mask=kept)


def rank_candidates(
    logits: Tensor,
    temperature: Tensor | None,
    count: int,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    alpha: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The candidates of every depth, ids and tree weights [B, L, K], best first.

    `ddtree.kernels.sampling.rank_candidates`, which takes the noise itself rather than what it is
    made of. Equal logits are ranked by id.

    logits:      [B, L, V] float32, float16 or bfloat16, contiguous, the whole vocabulary.
    temperature: [B] float32; None: 1 for every row.
    count:       K, up to 512 and V.
    seeds:       [B] int64; None for the plain tree. What follows is for the coupled one only.
    positions:   [B, L] int64, contiguous: absolute positions that the candidates would have.
    alpha:       [L] float32, trust in the drafter at each depth.
    scale:       [L] float32, what perturbed scores are divided by.

    Returns ids int64 and weights float32.

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or K is out of range.
    """
    _check(logits, temperature, count, seeds, positions, alpha)
    if seeds is not None:
        if scale is None:
            raise ValueError("seeds: need temperature, positions, alpha and scale beside them")
        check("scale", scale, (logits.shape[1],), torch.float32)
    return _candidates_op(logits, temperature, count, seeds, positions, alpha, scale)


def local_candidates(
    logits: Tensor,
    temperature: Tensor | None,
    count: int,
    first_id: int,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    alpha: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`ddtree.kernels.shards.local_candidates`, best ones in any order.

    The arguments, and errors raised, are those of `rank_candidates`; V tokens from `first_id` on.
    """
    count = min(count, logits.shape[-1])
    _check(logits, temperature, count, seeds, positions, alpha)
    best, maxima, sums = _best_op(logits, temperature, count, first_id, seeds, positions, alpha)
    shape = (*logits.shape[:2], count)
    packed = best.view(shape)
    values = logits.gather(2, 0xFFFFFFFF - (packed & 0xFFFFFFFF) - first_id).float()
    return packed, values, (sums.log() + maxima).logsumexp(1).view(shape[:2])


def _check(
    logits: Tensor,
    temperature: Tensor | None,
    count: int,
    seeds: Tensor | None,
    positions: Tensor | None,
    alpha: Tensor | None,
) -> None:
    check_logits(logits)
    batch, depths, vocab = logits.shape
    if not 1 <= count <= min(MAX_COUNT, vocab):
        raise ValueError(f"count: expected 1 to {min(MAX_COUNT, vocab)}, got {count}")
    if temperature is not None:
        check("temperature", temperature, (batch,), torch.float32)
    if seeds is not None:
        if temperature is None or positions is None or alpha is None:
            raise ValueError("seeds: need temperature, positions, alpha and scale beside them")
        check("seeds", seeds, (batch,), torch.int64)
        check("positions", positions, (batch, depths), torch.int64)
        check("alpha", alpha, (depths,), torch.float32)


@torch.library.custom_op("ddtree::rank_candidates", mutates_args=())
def _candidates_op(
    logits: Tensor,
    temperature: Tensor | None,
    count: int,
    seeds: Tensor | None,
    positions: Tensor | None,
    alpha: Tensor | None,
    scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    best, maxima, sums = _best_op(logits, temperature, count, 0, seeds, positions, alpha)
    batch, depths, vocab = logits.shape
    rows, parts = maxima.shape
    ids = best.new_empty(batch, depths, count)
    weights = torch.empty_like(ids, dtype=torch.float32)
    heat = maxima if temperature is None else temperature
    coupled = seeds is not None
    modes = {"TEMPERED": temperature is not None and not coupled, "COUPLED": coupled}
    _rank[(rows,)](
        logits,
        vocab,
        depths,
        count,
        heat,
        COLDEST,
        heat if scale is None else scale,
        best,
        maxima,
        sums,
        parts,
        ids,
        weights,
        **modes,
        KEPT=power_of_two(count),
        PARTS=power_of_two(parts),
        TILE=16,
        num_warps=warps(8 * count),
    )
    return ids, weights


@_candidates_op.register_fake
def _(
    logits: Tensor,
    temperature: Tensor | None,
    count: int,
    seeds: Tensor | None,
    positions: Tensor | None,
    alpha: Tensor | None,
    scale: Tensor | None,
) -> tuple[Tensor, Tensor]:
    ids = logits.new_empty(*logits.shape[:2], count, dtype=torch.int64)
    return ids, torch.empty_like(ids, dtype=torch.float32)


@torch.library.custom_op("ddtree::best_candidates", mutates_args=())
def _best_op(
    logits: Tensor,
    temperature: Tensor | None,
    count: int,
    first_id: int,
    seeds: Tensor | None,
    positions: Tensor | None,
    alpha: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The best of every row, packed `[B * L, K]`, and maxima and sums `[B * L, parts]`."""
    batch, depths, vocab = logits.shape
    rows, block = batch * depths, _block(count, vocab)
    parts = -(-vocab // block)
    best = logits.new_empty(rows, parts, count, dtype=torch.int64)
    maxima, sums = (logits.new_empty(rows, parts, dtype=torch.float32) for _ in range(2))
    heat = maxima if temperature is None else temperature
    coupled = seeds is not None
    _part[(rows, parts)](
        logits,
        vocab,
        first_id,
        depths,
        count,
        heat,
        COLDEST,
        best if seeds is None else seeds,
        best if positions is None else positions,
        heat if alpha is None else alpha,
        best,
        maxima,
        sums,
        TEMPERED=temperature is not None and not coupled,
        COUPLED=coupled,
        BLOCK=block,
        num_warps=warps(block),
    )
    while best.shape[1] > 1:
        group = min(best.shape[1], MERGED // count)
        merged = best.new_empty(rows, -(-best.shape[1] // group), count)
        entries, group = best.shape[1] * count, group * count
        size = power_of_two(group)
        _merge[(rows, merged.shape[1])](
            best, entries, group, count, merged, GROUP=size, num_warps=min(8, warps(size))
        )
        best = merged
    return best.view(rows, count), maxima, sums


@_best_op.register_fake
def _(
    logits: Tensor,
    temperature: Tensor | None,
    count: int,
    first_id: int,
    seeds: Tensor | None,
    positions: Tensor | None,
    alpha: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    batch, depths, vocab = logits.shape
    rows, parts = batch * depths, -(-vocab // _block(count, vocab))
    best = logits.new_empty(rows, count, dtype=torch.int64)
    maxima, sums = (logits.new_empty(rows, parts, dtype=torch.float32) for _ in range(2))
    return best, maxima, sums


def _block(count: int, vocab: int) -> int:
    return max(16, power_of_two(count), min(2048, power_of_two(vocab)))
