"""Attention over paged keys: prefill chunks, draft blocks, chains and trees, in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.kernels.checks import power_of_two
from ddtree.kernels.lazy import Arg, constexpr, kernel, tl
from ddtree.kernels.paged_plan import (
    KINDS,
    PagedPlan,
    check_attention,
    check_plan,
    chip_of,
    choose_splits,
    choose_tile,
    merge_rows,
    tile_constants,
)

LOG2_E = 1.4426950408889634


@kernel
def _attend(
    query: Arg,
    total: Arg,
    top: Arg,
    weight: Arg,
    kv: Arg,
    table: Arg,
    keys: Arg,
    loaded: Arg,
    visible: Arg,
    scale: Arg,
    PAGE: constexpr,
    SLOT: constexpr,
    DIM: constexpr,
    BLOCK_D: constexpr,
) -> Arg:
    """One block of the online softmax (Dao 2023, FlashAttention-2, section 3.1).

    Keys that are not `loaded` read as zeros, so that nothing a slot may hold gets through a weight
    of zero. `top` is the largest score so far, -inf before the first visible key.
    """
    page = tl.load(table + keys // PAGE, mask=loaded, other=0).to(tl.int64)
    base = (page * PAGE + keys % PAGE) * SLOT
    dim = tl.arange(0, BLOCK_D)
    pointers = kv + base[:, None] + dim[None, :]
    mask = loaded[:, None]
    if BLOCK_D != DIM:
        mask = mask & (dim < DIM)[None, :]
    k = tl.load(pointers, mask=mask, other=0.0)
    v = tl.load(pointers + SLOT // 2, mask=mask, other=0.0)
    scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    # Rows that see nothing yet: -inf minus -inf would be NaN.
    level = tl.where(new_top == float("-inf"), 0.0, new_top)
    p = tl.exp2(scores - level[:, None])
    shrink = tl.exp2(top - level)
    weight = weight * shrink + tl.sum(p, 1)
    total = total * shrink[:, None]
    total = tl.dot(p.to(v.dtype), v, total, input_precision="ieee")
    return total, new_top, weight


@kernel
def attention_kernel(
    q: Arg,
    kv: Arg,
    table: Arg,
    prefix: Arg,
    words: Arg,
    out: Arg,
    partial: Arg,
    levels: Arg,
    scale: Arg,
    window: Arg,
    num_tokens: Arg,
    q_row: Arg,
    q_token: Arg,
    table_row: Arg,
    prefix_row: Arg,
    words_row: Arg,
    words_token: Arg,
    KIND: constexpr,
    WINDOWED: constexpr,
    SPLIT: constexpr,
    PAGE: constexpr,
    GROUP: constexpr,
    KV_HEADS: constexpr,
    DIM: constexpr,
    BLOCK_D: constexpr,
    BLOCK_M: constexpr,
    BLOCK_N: constexpr,
    OWN_STAGES: constexpr,
) -> None:
    """Programs: (tiles of node * GROUP + g, row * KV_HEADS + head, split of the keys).

    The prefix's blocks of keys, then the block's own, are dealt out evenly to the splits. How many
    there are is read from `prefix`, so that the grid holds for any context.
    """
    SLOT: constexpr = 2 * KV_HEADS * DIM
    tile = tl.program_id(0)
    row = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    head = tl.program_id(1) % KV_HEADS
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    length = tl.load(prefix + row * prefix_row).to(tl.int32)
    table += row * table_row
    kv += head * DIM

    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = packed // GROUP
    live = token < num_tokens
    dim = tl.arange(0, BLOCK_D)
    tile_mask = live[:, None] & (dim < DIM)[None, :]
    q_head = head * GROUP + packed % GROUP
    query = q + row * q_row + token[:, None] * q_token + q_head[:, None] * DIM + dim[None, :]
    query = tl.load(query, mask=tile_mask, other=0.0)

    first_token = tile * BLOCK_M // GROUP
    own_end = num_tokens
    if KIND == 0:
        own_end = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP + 1, num_tokens)
    own_start = 0
    start = 0
    if WINDOWED:
        own_start = tl.maximum(first_token - window + 1, 0) // BLOCK_N
        start = tl.minimum(tl.maximum(length + first_token - window + 1, 0), length) // BLOCK_N
    prefix_blocks = tl.cdiv(length, BLOCK_N) - start
    blocks = prefix_blocks + tl.cdiv(own_end, BLOCK_N) - own_start
    low = blocks * split // splits
    high = blocks * (split + 1) // splits

    total = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    column = tl.arange(0, BLOCK_N)
    for block in range(low, tl.minimum(high, prefix_blocks)):
        keys = (start + block) * BLOCK_N + column
        loaded = keys < length
        visible = loaded[None, :]
        if WINDOWED:
            visible = visible & (keys[None, :] > length + token[:, None] - window)
        total, top, weight = _attend(
            query, total, top, weight, kv, table, keys, loaded, visible, scale, PAGE, SLOT, DIM,
            BLOCK_D,
        )  # fmt: skip
    for block in tl.range(tl.maximum(low, prefix_blocks), high, num_stages=OWN_STAGES):
        own_block = own_start + block - prefix_blocks
        own = own_block * BLOCK_N + column
        loaded = own < num_tokens
        visible = loaded[None, :]
        if KIND == 0:
            visible = visible & (own[None, :] <= token[:, None])
        if KIND == 2:
            # BLOCK_N divides 64, so that one word of every node covers the block; in halves,
            # because 64-bit masks would take twice the registers.
            word = words + row * words_row + token * words_token + own_block * BLOCK_N // 64
            word = tl.load(word, mask=live, other=0)
            bit = own_block * BLOCK_N % 64 + column
            half = tl.where(
                bit[None, :] < 32, word.to(tl.int32)[:, None], (word >> 32).to(tl.int32)[:, None]
            )
            visible = visible & (((half >> (bit % 32)[None, :]) & 1) != 0)
        if WINDOWED:
            visible = visible & (own[None, :] > token[:, None] - window)
        total, top, weight = _attend(
            query, total, top, weight, kv, table, length + own, loaded, visible, scale, PAGE, SLOT,
            DIM, BLOCK_D,
        )  # fmt: skip

    seen = weight > 0.0
    total = total / tl.where(seen, weight, 1.0)[:, None]
    if SPLIT:
        # [splits, B * KV_HEADS, T * GROUP (, DIM)]
        at = split * tl.num_programs(1) + tl.program_id(1)
        at = at.to(tl.int64) * num_tokens * GROUP + packed
        level = top + tl.log2(tl.where(seen, weight, 1.0))
        tl.store(levels + at, level, mask=live)
        partial += at[:, None] * DIM + dim[None, :]
        tl.store(partial, total, mask=tile_mask & seen[:, None])
    else:
        at = (row * num_tokens + token) * (KV_HEADS * GROUP) + q_head
        tl.store(
            out + at[:, None] * DIM + dim[None, :], total.to(out.dtype.element_ty), mask=tile_mask
        )


@kernel
def merge_kernel(
    partial: Arg,
    levels: Arg,
    out: Arg,
    num_tokens: Arg,
    splits: Arg,
    GROUP: constexpr,
    KV_HEADS: constexpr,
    DIM: constexpr,
    BLOCK_D: constexpr,
    BLOCK_S: constexpr,
    BLOCK_R: constexpr,
) -> None:
    """Merge the splits by their log-sum-exp. Programs: (tiles of packed rows, row * head)."""
    pair = tl.program_id(1)
    row = (pair // KV_HEADS).to(tl.int64)
    packed = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    rows = num_tokens * GROUP
    split = tl.arange(0, BLOCK_S)
    dim = tl.arange(0, BLOCK_D)
    at = (split[:, None] * tl.num_programs(1) + pair).to(tl.int64) * rows + packed[None, :]
    live = (split[:, None] < splits) & (packed[None, :] < rows)
    level = tl.load(levels + at, mask=live, other=float("-inf"))
    top = tl.max(level, 0)
    share = tl.exp2(level - tl.where(top == float("-inf"), 0.0, top)[None, :])
    sum_of_shares = tl.sum(share, 0)
    share = share / tl.where(sum_of_shares > 0.0, sum_of_shares, 1.0)[None, :]
    mask = (level > float("-inf"))[:, :, None] & (dim < DIM)[None, None, :]
    part = tl.load(partial + at[:, :, None] * DIM + dim[None, None, :], mask=mask, other=0.0)
    total = tl.sum(part * share[:, :, None], 0)
    at = (row * num_tokens + packed // GROUP) * (KV_HEADS * GROUP)
    at += pair % KV_HEADS * GROUP + packed % GROUP
    mask = (packed < rows)[:, None] & (dim < DIM)[None, :]
    tl.store(out + at[:, None] * DIM + dim[None, :], total.to(out.dtype.element_ty), mask=mask)


@torch.library.custom_op(
    "ddtree::paged_attention",
    mutates_args=(),
    schema="(Tensor q, Tensor kv_layer, Tensor block_table, Tensor prefix_len, Tensor? words, "
    "int page_size, str kind, int window, float scale, int multiprocessors) -> Tensor",
)
def paged_attention(
    q: Tensor,
    kv_layer: Tensor,
    block_table: Tensor,
    prefix_len: Tensor,
    words: Tensor | None,
    page_size: int,
    kind: str,
    window: int,
    scale: float,
    multiprocessors: int,
) -> Tensor:
    """Attend from T tokens per row to the row's prefix and to the tokens' own keys.

    The prefix's keys are read once for all tokens and all heads of a group that share a tile of
    rows (see `choose_tile`); the tiles of a head run side by side and meet in the L2 cache.

    Args:
        q: [B, T, Hq, D] float32, float16 or bfloat16; the last two dimensions contiguous.
        kv_layer: [slots, 2, Hkv, D] contiguous, of q's dtype; Hkv divides Hq; D is a multiple of 8
            from 16 to 256, and costs what the next power of two does.
        block_table: [B, P] integer, rows contiguous; slot = page * page_size + offset.
        prefix_len: [B] integer, of any stride; token t's own key is at position prefix_len + t.
        words: [B, T, W] int64, last dimension contiguous, for kind "tree".
        page_size: a power of two.
        kind: "causal", "full" or "tree" (see `View`).
        window: a token sees keys from its own position - window + 1 on; 0: from the first.
        scale: factor on the scores, before the softmax.
        multiprocessors: programs that the device runs at a time.

    Returns:
        [B, T, Hq, D] contiguous, of q's dtype; zeros for a token that sees nothing.

    Raises:
        ValueError: an argument is not as described.
    """
    check_attention(q, kv_layer)
    batch, tokens, heads, dim = q.shape
    if block_table.shape[0] != batch:
        raise ValueError(f"block_table: expected {batch} rows, got {block_table.shape[0]}")
    check_plan(PagedPlan(block_table, prefix_len, words, tokens, page_size, ((kind, window),)))
    kv_heads = kv_layer.shape[2]
    group = heads // kv_heads
    tile = choose_tile(tokens * group, dim, q.element_size(), chip_of(q.device))
    tiles = -(-tokens * group // tile.rows)
    key_blocks = -(-block_table.shape[1] * page_size // tile.keys)
    splits = choose_splits(tiles * batch * kv_heads, batch, key_blocks, multiprocessors)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    rows = (splits, batch * kv_heads, tokens * group)
    partial = levels = out
    if splits > 1:
        partial = torch.empty(*rows, dim, dtype=torch.float32, device=q.device)
        levels = torch.empty(rows, dtype=torch.float32, device=q.device)
    masks = prefix_len if words is None else words
    head_shape = {"GROUP": group, "KV_HEADS": kv_heads, "DIM": dim, "BLOCK_D": power_of_two(dim)}
    attention_kernel[tiles, batch * kv_heads, splits](
        q,
        kv_layer,
        block_table,
        prefix_len,
        masks,
        out,
        partial,
        levels,
        scale * LOG2_E,
        window,
        tokens,
        q.stride(0),
        q.stride(1),
        block_table.stride(0),
        prefix_len.stride(0),
        masks.stride(0),
        0 if words is None else words.stride(1),
        KIND=KINDS[kind],
        WINDOWED=window > 0,
        SPLIT=splits > 1,
        PAGE=page_size,
        **head_shape,
        **tile_constants(tile, kind),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if splits > 1:
        block_s = power_of_two(splits)
        block_r = min(merge_rows(block_s, power_of_two(dim)), power_of_two(tokens * group))
        merge_kernel[-(-tokens * group // block_r), batch * kv_heads](
            partial, levels, out, tokens, splits, **head_shape, BLOCK_S=block_s, BLOCK_R=block_r
        )
    return out


@paged_attention.register_fake
def _(q: Tensor, *args: Tensor | int | str | float | None) -> Tensor:
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)
