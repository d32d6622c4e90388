"""The least logit that top-k, top-p and min-p keep, found in one launch and without a sort."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.kernels.checks import check, check_logits, power_of_two, warps
from ddtree.kernels.gumbel import key_value, sort_key
from ddtree.kernels.lazy import Arg, constexpr, kernel, tl
from ddtree.kernels.sampling import Filters

BLOCK = 2048
"""Tokens of a row that a program holds at once: four to a thread, or registers run out."""


@kernel
def _search(
    logits: Arg,
    vocab: Arg,
    lowest: Arg,
    highest: Arg,
    wanted: Arg,
    least: Arg,
    most: Arg,
    temperature: Arg,
    MASS: constexpr,
    BLOCK: constexpr,
) -> Arg:
    """The largest key in `lowest <= key < highest` at or above which there is the mass `wanted`.

    A token counts 1, or with MASS its probability as an integer, and nothing below `least`. From
    `lowest` on there is enough, from `highest` on there is not. Halves the interval of values and
    that of keys in turn, and draws each end in to the next logit.
    """
    columns = tl.arange(0, BLOCK)
    turn = 0
    while highest - lowest > 1:
        middle = (lowest + highest) >> 1
        if turn % 2 == 0:
            low, high = key_value(lowest.to(tl.int32)), key_value((highest - 1).to(tl.int32))
            key = sort_key(0.5 * low + 0.5 * high).to(tl.int64)
            middle = tl.where((key > lowest) & (key < highest), key, middle)
        turn += 1
        total = tl.zeros([BLOCK], tl.int64)
        above = tl.full([BLOCK], 0x7FFFFFFF, tl.int32)
        below = tl.full([BLOCK], -0x80000000, tl.int32)
        for start in range(0, vocab, BLOCK):
            inside = start + columns < vocab
            x = tl.load(logits + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
            key = sort_key(x)
            high = inside & (key >= middle)
            if MASS:
                mass = _mass(x, least, most, temperature)
            else:
                mass = tl.full([BLOCK], 1, tl.int64)
            total += tl.where(high, mass, 0)
            above = tl.minimum(above, tl.where(high, key, 0x7FFFFFFF))
            below = tl.maximum(below, tl.where(inside & (key < middle), key, -0x80000000))
        enough = tl.sum(total, 0) >= wanted
        lowest = tl.where(enough, tl.min(above, 0).to(tl.int64), lowest)
        highest = tl.where(enough, highest, tl.max(below, 0).to(tl.int64) + 1)
    return lowest


@kernel
def _mass(x: Arg, least: Arg, most: Arg, temperature: Arg) -> Arg:
    share = tl.exp((x - most) / temperature) * 1099511627776.0
    return tl.where(x >= least, share, 0.0).to(tl.int64)


@kernel
def _threshold(
    logits: Arg,
    row_stride: Arg,
    vocab: Arg,
    nodes: Arg,
    temperature: Arg,
    top_k: Arg,
    top_p: Arg,
    min_p: Arg,
    thresholds: Arg,
    TOP_K: constexpr,
    TOP_P: constexpr,
    MIN_P: constexpr,
    BLOCK: constexpr,
) -> None:
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    request = row // nodes
    heat = tl.load(temperature + request)
    heat = tl.where(heat > 0, heat, 1.0)
    columns = tl.arange(0, BLOCK)

    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    smallest = tl.full([BLOCK], float("inf"), tl.float32)
    for start in range(0, vocab, BLOCK):
        inside = start + columns < vocab
        x = tl.load(logits + start + columns, mask=inside, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, x)
        smallest = tl.minimum(smallest, tl.where(inside, x, float("inf")))
    most = tl.max(largest, 0)
    lowest = sort_key(tl.min(smallest, 0)).to(tl.int64)
    highest = sort_key(most).to(tl.int64) + 1
    least = tl.full([], float("-inf"), tl.float32)
    if TOP_K:
        k = tl.load(top_k + request)
        if k > 0:
            k = tl.minimum(k, vocab)
            key = _search(logits, vocab, lowest, highest, k, least, most, heat, False, BLOCK)
            least = key_value(key.to(tl.int32))
    if TOP_P:
        p = tl.load(top_p + request)
        if p < 1:
            total = tl.zeros([BLOCK], tl.int64)
            for start in range(0, vocab, BLOCK):
                inside = start + columns < vocab
                x = tl.load(logits + start + columns, mask=inside, other=float("-inf"))
                total += _mass(x.to(tl.float32), least, most, heat)
            share = tl.ceil(tl.sum(total, 0).to(tl.float64) * p.to(tl.float64)).to(tl.int64)
            share = tl.maximum(share, 1)
            # Below this there is no mass: 2^40 * exp(-28) < 1.
            floor = sort_key(tl.maximum(least, most - 28.0 * heat)).to(tl.int64)
            floor = tl.minimum(tl.maximum(lowest, floor), highest - 1)
            key = _search(logits, vocab, floor, highest, share, least, most, heat, True, BLOCK)
            least = tl.maximum(least, key_value(key.to(tl.int32)))
    if MIN_P:
        least = tl.maximum(least, most + heat * tl.log(tl.load(min_p + request)))
    tl.store(thresholds + row, least)


def filter_threshold(logits: Tensor, filters: Filters) -> Tensor:
    """Smallest logit that top-k, top-p and min-p keep: `ddtree.kernels.sampling`'s in one launch.

    logits:  [B, N, V] float32, float16 or bfloat16, contiguous, the whole vocabulary.
    filters: per-row numbers [B], contiguous: float32, top-k int64.

    Returns [B, N] float32, -inf where all tokens are kept.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
    """
    check_logits(logits)
    batch = logits.shape[0]
    check("temperature", filters.temperature, (batch,), torch.float32)
    if filters.top_k is not None:
        check("top_k", filters.top_k, (batch,), torch.int64)
    for name, value in (("top_p", filters.top_p), ("min_p", filters.min_p)):
        if value is not None:
            check(name, value, (batch,), torch.float32)
    return _threshold_op(logits, filters.temperature, filters.top_k, filters.top_p, filters.min_p)


@torch.library.custom_op("ddtree::filter_threshold", mutates_args=())
def _threshold_op(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> Tensor:
    batch, nodes, vocab = logits.shape
    block = block_of(vocab, BLOCK)
    out = logits.new_empty(batch, nodes, dtype=torch.float32)
    _threshold[(batch * nodes,)](
        logits,
        logits.stride(1),
        vocab,
        nodes,
        temperature,
        temperature if top_k is None else top_k,
        temperature if top_p is None else top_p,
        temperature if min_p is None else min_p,
        out,
        TOP_K=top_k is not None,
        TOP_P=top_p is not None,
        MIN_P=min_p is not None,
        BLOCK=block,
        num_warps=warps(2 * block),
    )
    return out


@_threshold_op.register_fake
def _(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> Tensor:
    return logits.new_empty(logits.shape[:2], dtype=torch.float32)


def block_of(vocab: int, most: int) -> int:
    """Tokens that a program holds at once, for rows of this length: `most`, or fewer."""
    return min(most, max(16, power_of_two(vocab)))
