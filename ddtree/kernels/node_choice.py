"""The target's token after every node: filters, noise and argmax without a tensor in between."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.kernels.checks import check, check_logits, power_of_two, warps
from ddtree.kernels.filter_threshold import block_of, filter_threshold
from ddtree.kernels.gumbel import gumbel, noise_bits, noise_key, pack
from ddtree.kernels.lazy import Arg, constexpr, kernel, tl
from ddtree.kernels.sampling import Filters

BLOCK = 4096
"""Tokens of a row that a program holds at once."""
PROGRAMS = 512
"""Programs to aim for: a row is split where there are fewer rows."""


@kernel
def _choose(
    logits: Arg,
    row_stride: Arg,
    vocab: Arg,
    nodes: Arg,
    first_id: Arg,
    thresholds: Arg,
    temperature: Arg,
    seeds: Arg,
    positions: Arg,
    parts: Arg,
    per_split: Arg,
    FILTER: constexpr,
    NOISE: constexpr,
    BLOCK: constexpr,
) -> None:
    row = tl.program_id(0)
    split = tl.program_id(1)
    logits += row.to(tl.int64) * row_stride
    request = row // nodes
    heat = 0.0
    if NOISE:
        heat = tl.load(temperature + request)
        low, high = noise_key(tl.load(seeds + request), tl.load(positions + row))
    least = float("-inf")
    if FILTER:
        least = tl.load(thresholds + row)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.zeros([BLOCK], tl.int32) + split * per_split
    end = tl.minimum(vocab, (split + 1) * per_split)
    for start in range(split * per_split, end, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits + columns, mask=columns < end, other=float("-inf")).to(tl.float32)
        if FILTER:
            x = tl.where(x >= least, x, float("-inf"))
        if NOISE:  # noqa: SIM102 (compiled for one, decided at run time by the other)
            if heat > 0:
                x += heat * gumbel(noise_bits(columns + first_id, low, high))
        # Of equal ones the first stays.
        better = x > best
        best = tl.where(better, x, best)
        where = tl.where(better, columns, where)
    tl.store(parts + row * tl.num_programs(1) + split, tl.max(pack(best, where + first_id), 0))


@kernel
def _join(parts: Arg, chosen: Arg, packed: Arg, splits: Arg, SPLITS: constexpr) -> None:
    row = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    part = tl.load(parts + row * splits + split, mask=split < splits, other=-0x7FFFFFFFFFFFFFFF)
    best = tl.max(part, 0)
    tl.store(packed + row, best)
    tl.store(chosen + row, 0xFFFFFFFF - (best & 0xFFFFFFFF))


def choose_tokens(
    logits: Tensor,
    filters: Filters | None = None,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    first_id: int = 0,
    thresholds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The most likely token of every row, of those that the filters keep and after its noise.

    logits:    [B, N, V] float32, float16 or bfloat16, contiguous, processed, before temperature;
               V is this shard's part of the vocabulary, from token `first_id` on.
    filters:   None: none, at temperature 0.
    seeds:     [B] int64; None: no noise, whatever the temperature.
    positions: [B, N] int64, contiguous: absolute position of the token that a node chooses.
    thresholds: [B, N] float32 where known already, as they are when the vocabulary is sharded.

    Returns [B, N] int64 each: the tokens, and the numbers `sort key << 32 | ~token` whose maximum
    over the shards is the whole vocabulary's choice. Ties go to the smallest id.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
    """
    check_logits(logits)
    shape = logits.shape[:2]
    temperature = None
    if filters is not None:
        if thresholds is None and (filters.top_k, filters.top_p, filters.min_p) != (None,) * 3:
            thresholds = filter_threshold(logits, filters)
        temperature = filters.temperature
        check("temperature", temperature, shape[:1], torch.float32)
    if thresholds is not None:
        check("thresholds", thresholds, shape, torch.float32)
    if seeds is None or temperature is None:
        seeds = positions = temperature = None
    else:
        check("seeds", seeds, shape[:1], torch.int64)
        if positions is None:
            raise ValueError("positions: needed with seeds")
        check("positions", positions, shape, torch.int64)
    return _choose_op(logits, thresholds, temperature, seeds, positions, first_id)


@torch.library.custom_op("ddtree::choose_tokens", mutates_args=())
def _choose_op(
    logits: Tensor,
    thresholds: Tensor | None,
    temperature: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
    first_id: int,
) -> tuple[Tensor, Tensor]:
    batch, nodes, vocab = logits.shape
    rows, block = batch * nodes, block_of(vocab, BLOCK)
    chosen = logits.new_empty(batch, nodes, dtype=torch.int64)
    packed = torch.empty_like(chosen)
    blocks = -(-vocab // block)
    per_split = -(-blocks // max(1, min(blocks, PROGRAMS // rows))) * block
    splits = -(-vocab // per_split)
    parts = chosen.new_empty(rows, splits)
    _choose[(rows, splits)](
        logits,
        logits.stride(1),
        vocab,
        nodes,
        first_id,
        chosen if thresholds is None else thresholds,
        chosen if temperature is None else temperature,
        chosen if seeds is None else seeds,
        chosen if positions is None else positions,
        parts,
        per_split,
        FILTER=thresholds is not None,
        NOISE=seeds is not None,
        BLOCK=block,
        num_warps=warps(block),
    )
    _join[(rows,)](parts, chosen, packed, splits, SPLITS=power_of_two(splits), num_warps=1)
    return chosen, packed


@_choose_op.register_fake
def _(
    logits: Tensor,
    thresholds: Tensor | None,
    temperature: Tensor | None,
    seeds: Tensor | None,
    positions: Tensor | None,
    first_id: int,
) -> tuple[Tensor, Tensor]:
    chosen = logits.new_empty(logits.shape[:2], dtype=torch.int64)
    return chosen, torch.empty_like(chosen)
