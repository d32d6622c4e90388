"""Stores to the paged KV cache: new tokens' keys and values, and the accepted path's move."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.kernels.checks import FLOATS, check, power_of_two
from ddtree.kernels.lazy import Arg, constexpr, kernel, tl

MOVE_ELEMENTS = 8192
"""Elements of all moved rows that one program holds in registers, between load and store."""
MAX_MOVED = 4096
WRITE_ELEMENTS = 1024
HEADS_PER_PROGRAM = 8


@kernel
def write_kernel(
    kv: Arg,
    kv_row: Arg,
    kv_token: Arg,
    slots: Arg,
    slots_row: Arg,
    out: Arg,
    num_tokens: Arg,
    SLOT: constexpr,
    BLOCK: constexpr,
) -> None:
    """Programs: (tokens of all rows, pieces of a slot)."""
    row, token = tl.program_id(0) // num_tokens, tl.program_id(0) % num_tokens
    slot = tl.load(slots + row * slots_row + token).to(tl.int64)
    kv += row.to(tl.int64) * kv_row + token * kv_token
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < SLOT
    tl.store(out + slot * SLOT + column, tl.load(kv + column, mask=mask), mask=mask)


@kernel
def move_kernel(
    kv: Arg,
    source: Arg,
    target: Arg,
    count: Arg,
    layer_stride: Arg,
    SLOT: constexpr,
    BLOCK_R: constexpr,
    BLOCK_C: constexpr,
) -> None:
    """Programs: (pieces of a slot, layers); each moves its piece of all rows, as integers."""
    row = tl.arange(0, BLOCK_R)
    column = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    start = tl.load(source + row, mask=row < count, other=0).to(tl.int64)
    end = tl.load(target + row, mask=row < count, other=0).to(tl.int64)
    # A row that stays costs nothing; nor do a path's masked-out entries, dummy to dummy.
    mask = (start != end)[:, None] & (column < SLOT)[None, :]
    kv += tl.program_id(1).to(tl.int64) * layer_stride
    values = tl.load(kv + start[:, None] * SLOT + column[None, :], mask=mask, other=0)
    # Warps load what others overwrite. A sum over all that was loaded is there only once it was; a
    # barrier, on AMD, waits for no loads. No sum of so many 32-bit integers is that large.
    loaded = tl.sum(tl.sum(values.to(tl.int64), 1), 0) + tl.zeros([BLOCK_R], tl.int64)
    mask = mask & (loaded < (1 << 60))[:, None]
    tl.store(kv + end[:, None] * SLOT + column[None, :], values, mask=mask)


@kernel
def rotate_kernel(
    heads: Arg,
    row_stride: Arg,
    token_stride: Arg,
    layer_heads: Arg,
    cos: Arg,
    sin: Arg,
    q_weight: Arg,
    k_weight: Arg,
    eps: Arg,
    slots: Arg,
    slots_row: Arg,
    q_out: Arg,
    kv: Arg,
    layer_stride: Arg,
    num_tokens: Arg,
    NORM: constexpr,
    Q_HEADS: constexpr,
    KV_HEADS: constexpr,
    DIM: constexpr,
    HALF: constexpr,
    BLOCK_H: constexpr,
) -> None:
    """Programs: (tokens of all rows, tiles of heads, layers)."""
    token = tl.program_id(0)
    layer = tl.program_id(2)
    row, in_row = token // num_tokens, token % num_tokens
    slot = tl.load(slots + row * slots_row + in_row).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, HALF)
    inside = dim < DIM // 2
    mask = (head < Q_HEADS + 2 * KV_HEADS)[:, None] & inside[None, :]
    heads += row.to(tl.int64) * row_stride + in_row * token_stride
    at = (layer * layer_heads + head)[:, None] * DIM + dim[None, :]
    low = tl.load(heads + at, mask=mask, other=0.0)
    high = tl.load(heads + at + DIM // 2, mask=mask, other=0.0)
    low_out, high_out = low.to(tl.float32), high.to(tl.float32)
    if NORM:
        norm = tl.sum(low_out * low_out, 1) + tl.sum(high_out * high_out, 1)
        norm = tl.rsqrt(norm / DIM + eps)[:, None]
        weights = k_weight + layer * DIM + tl.zeros([BLOCK_H, 1], tl.int32) + dim[None, :]
        weights_mask = (head >= Q_HEADS)[:, None] & mask
        low_weight = tl.load(weights, mask=weights_mask, other=0.0).to(tl.float32)
        high_weight = tl.load(weights + DIM // 2, mask=weights_mask, other=0.0).to(tl.float32)
        if Q_HEADS:
            weights = q_weight + tl.zeros([BLOCK_H, 1], tl.int32) + dim[None, :]
            weights_mask = (head < Q_HEADS)[:, None] & mask
            low_weight += tl.load(weights, mask=weights_mask, other=0.0).to(tl.float32)
            high_weight += tl.load(weights + DIM // 2, mask=weights_mask, other=0.0).to(tl.float32)
        # Rounded where the unfused ops round: the tokens must not depend on the kernel set.
        low_out = (low_out * norm).to(low.dtype).to(tl.float32) * low_weight
        high_out = (high_out * norm).to(low.dtype).to(tl.float32) * high_weight
        low_out, high_out = (
            low_out.to(low.dtype).to(tl.float32),
            high_out.to(low.dtype).to(tl.float32),
        )
    angle = token * DIM + dim
    low_cos = tl.load(cos + angle, mask=inside, other=0.0)[None, :]
    high_cos = tl.load(cos + angle + DIM // 2, mask=inside, other=0.0)[None, :]
    low_sin = tl.load(sin + angle, mask=inside, other=0.0)[None, :]
    high_sin = tl.load(sin + angle + DIM // 2, mask=inside, other=0.0)[None, :]
    turned = low_out * low_cos + high_out * low_sin
    high_out = high_out * high_cos + low_out * high_sin
    value = (head >= Q_HEADS + KV_HEADS)[:, None]
    low = tl.where(value, low, turned.to(low.dtype))
    high = tl.where(value, high, high_out.to(low.dtype))
    if Q_HEADS:
        mine = mask & (head < Q_HEADS)[:, None]
        at = (token.to(tl.int64) * Q_HEADS + head)[:, None] * DIM + dim[None, :]
        tl.store(q_out + at, low, mask=mine)
        tl.store(q_out + at + DIM // 2, high, mask=mine)
    mine = mask & (head >= Q_HEADS)[:, None]
    at = layer.to(tl.int64) * layer_stride + slot * (2 * KV_HEADS * DIM)
    at += (head - Q_HEADS)[:, None] * DIM + dim[None, :]
    tl.store(kv + at, low, mask=mine)
    tl.store(kv + at + DIM // 2, high, mask=mine)


def move_columns(rows: int, slot: int) -> int:
    """Elements of each of `rows` slots that one program moves."""
    return min(max(MOVE_ELEMENTS // rows, 16), power_of_two(slot))


@torch.library.custom_op(
    "ddtree::write_kv",
    mutates_args=("kv_layer",),
    schema="(Tensor(a!) kv_layer, Tensor slots, Tensor kv) -> ()",
)
def write_kv(kv_layer: Tensor, slots: Tensor, kv: Tensor) -> None:
    """Store keys and values of new tokens.

    Args:
        kv_layer: [slots, 2, Hkv, D] contiguous.
        slots: [B, T] int64, rows contiguous. Where two tokens share a slot, either may stay.
        kv: [B, T, 2, Hkv, D] of kv_layer's dtype, the last three dimensions contiguous.

    Raises:
        ValueError: an argument is not as described.
    """
    slot = kv_layer[0].numel()
    if not kv_layer.is_contiguous() or kv.dtype != kv_layer.dtype:
        raise ValueError(f"kv_layer: expected contiguous [slots, 2, Hkv, D] of {kv.dtype}")
    if kv.shape != (*slots.shape, *kv_layer.shape[1:]):
        raise ValueError(f"kv: {tuple(kv.shape)} does not fit {tuple(slots.shape)} slots")
    if slots.stride(1) != 1 or slots.dtype != torch.int64:
        raise ValueError("slots: expected int64 with contiguous rows")
    if not kv.shape[1] or not kv[0, 0].is_contiguous():
        raise ValueError("kv: expected at least a token, its keys and values side by side")
    block = min(power_of_two(slot), WRITE_ELEMENTS)
    write_kernel[slots.numel(), -(-slot // block)](
        kv,
        kv.stride(0),
        kv.stride(1),
        slots,
        slots.stride(0),
        kv_layer,
        slots.shape[1],
        SLOT=slot,
        BLOCK=block,
    )


@torch.library.custom_op(
    "ddtree::move_kv",
    mutates_args=("kv",),
    schema="(Tensor(a!) kv, Tensor source, Tensor target) -> ()",
)
def move_kv(kv: Tensor, source: Tensor, target: Tensor) -> None:
    """Copy rows `source` to `target` in all layers, as if all were loaded before any is stored.

    Args:
        kv: [layers, slots, 2, Hkv, D] contiguous, 2 or 4 bytes a number.
        source, target: [n] int64 contiguous; no two rows that move share a target. Rows with
            source = target are neither read nor written.

    Raises:
        ValueError: an argument is not as described, or n is more than `MAX_MOVED`.
    """
    count, slot = source.numel(), kv[0, 0].numel()
    if not kv.is_contiguous() or kv.element_size() not in (2, 4):
        raise ValueError("kv: expected contiguous [layers, slots, 2, Hkv, D], 2 or 4 bytes each")
    if source.shape != target.shape or count > MAX_MOVED:
        raise ValueError(f"source: expected as many as targets, at most {MAX_MOVED}, got {count}")
    for name, rows in (("source", source), ("target", target)):
        check(name, rows, (count,), torch.int64)
    if not count:
        return
    block_r = power_of_two(count)
    block_c = move_columns(block_r, slot)
    bits = kv.view(torch.int16 if kv.element_size() == 2 else torch.int32)
    move_kernel[-(-slot // block_c), kv.shape[0]](
        bits, source, target, count, kv.stride(0), SLOT=slot, BLOCK_R=block_r, BLOCK_C=block_c
    )


@torch.library.custom_op(
    "ddtree::rotate_and_write",
    mutates_args=("kv",),
    schema="(Tensor heads, Tensor cos, Tensor sin, Tensor? q_weight, Tensor? k_weight, float eps, "
    "Tensor slots, Tensor(a!) kv) -> Tensor",
)
def rotate_and_write(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    slots: Tensor,
    kv: Tensor,
) -> Tensor:
    """Norm and rotate queries and keys, and store keys and values, in one pass.

    Args:
        heads: [B, T, layers, Hq + 2 * Hkv, D], the heads of queries, keys and values, each layer's
            contiguous; several layers only where Hq = 0.
        cos, sin: [B, T, 1, D] float32 contiguous; the first half of `sin` is negated.
        q_weight, k_weight: [D] and [layers, D], the norms' weights; k_weight None: no norm.
        eps: the norms' epsilon.
        slots: [B, T] int64, rows contiguous.
        kv: [layers, slots, 2, Hkv, D], each layer contiguous, of the heads' dtype.

    Returns:
        The queries [B, T, Hq, D], contiguous.

    Raises:
        ValueError: an argument is not as described.
    """
    batch, tokens, layers, count, dim = heads.shape
    kv_heads = kv.shape[3]
    q_heads = count - 2 * kv_heads
    if kv.shape[0] != layers or kv.shape[4] != dim or not kv[0].is_contiguous():
        raise ValueError(f"kv: expected contiguous [slots, 2, Hkv, {dim}] in each of {layers}")
    if kv.dtype != heads.dtype or q_heads < 0 or (q_heads and layers > 1) or dim % 2:
        raise ValueError(f"heads: {tuple(heads.shape)} does not fit {kv_heads} heads in kv")
    if heads.stride()[2:] != (count * dim, dim, 1) and layers > 1:
        raise ValueError("heads: expected the layers' heads side by side")
    if heads.stride()[3:] != (dim, 1):
        raise ValueError("heads: expected contiguous heads")
    if heads.dtype not in FLOATS:
        raise ValueError(f"heads: expected floats, got {heads.dtype}")
    for name, angle in (("cos", cos), ("sin", sin)):
        check(name, angle, (batch, tokens, 1, dim), torch.float32)
    if slots.shape != (batch, tokens) or slots.stride(1) != 1 or slots.dtype != torch.int64:
        raise ValueError(f"slots: expected int64 [{batch}, {tokens}] with contiguous rows")
    if q_weight is not None:
        check("q_weight", q_weight, (dim,), heads.dtype)
    if k_weight is not None:
        check("k_weight", k_weight.view(layers, -1), (layers, dim), heads.dtype)
    if (q_weight is None) != (k_weight is None or not q_heads):
        raise ValueError("q_weight: expected together with k_weight, where there are queries")
    out = torch.empty((batch, tokens, q_heads, dim), dtype=heads.dtype, device=heads.device)
    block = min(power_of_two(count), HEADS_PER_PROGRAM)
    rotate_kernel[batch * tokens, -(-count // block), layers](
        heads,
        heads.stride(0),
        heads.stride(1),
        count,
        cos,
        sin,
        heads if q_weight is None else q_weight,
        heads if k_weight is None else k_weight,
        eps,
        slots,
        slots.stride(0),
        out,
        kv,
        kv.stride(0),
        tokens,
        NORM=k_weight is not None,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        DIM=dim,
        HALF=power_of_two(dim // 2),
        BLOCK_H=block,
    )
    return out


@write_kv.register_fake
def _(kv_layer: Tensor, slots: Tensor, kv: Tensor) -> None:
    return None


@move_kv.register_fake
def _(kv: Tensor, source: Tensor, target: Tensor) -> None:
    return None


@rotate_and_write.register_fake
def _(heads: Tensor, *args: Tensor | float | None) -> Tensor:
    kv = args[-1]
    assert isinstance(kv, Tensor)
    batch, tokens, _, count, dim = heads.shape
    return heads.new_empty(batch, tokens, count - 2 * kv.shape[3], dim)
