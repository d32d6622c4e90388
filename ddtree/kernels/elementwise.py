"""RMSNorm with or without the residual addition, SwiGLU's gate and RoPE: one launch each."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.kernels.checks import FLOATS, check, describe, outer_stride, power_of_two, warps
from ddtree.kernels.lazy import Arg, constexpr, kernel, tl

MAX_SIZE = 32768
"""The longest row that a program holds."""

# All arithmetic is in float32 whatever the dtype, with one rounding at the end.


@kernel
def _rms_norm(
    x: Arg,
    outer_stride: Arg,
    inner: Arg,
    rows: Arg,
    size: Arg,
    residual: Arg,
    total: Arg,
    weight: Arg,
    out: Arg,
    eps: Arg,
    RESIDUAL: constexpr,
    ROWS: constexpr,
    SIZE: constexpr,
) -> None:
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    inside = (row < rows) & (column < size)
    start = (row // inner) * outer_stride + (row % inner) * size
    value = tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)
    if RESIDUAL:
        value += tl.load(residual + row * size + column, mask=inside, other=0.0).to(tl.float32)
        # The norm sees what the stream keeps.
        rounded = value.to(total.dtype.element_ty)
        tl.store(total + row * size + column, rounded, mask=inside)
        value = rounded.to(tl.float32)
    scale = tl.load(weight + column, mask=column < size, other=0.0).to(tl.float32)
    mean = tl.sum(value * value, 1)[:, None] / size
    normed = value * (1.0 / tl.sqrt(mean + eps)) * scale
    tl.store(out + row * size + column, normed.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension.

    x:      [..., size] float32, float16 or bfloat16; contiguous, or [B, T, heads, size] cut out of
            longer heads: its last two dimensions contiguous, the others evenly spaced.
    weight: [size], of the same dtype, contiguous.

    Returns a contiguous tensor of x's shape and dtype.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
    """
    _check_size(x)
    check("weight", weight, x.shape[-1:], x.dtype)
    return _rms_norm_op(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream after an addition, and its norm: `s = x + residual`, `rms_norm(s)`.

    x, residual: [..., size] of one dtype, contiguous.
    weight:      [size], of the same dtype, contiguous.

    Returns two tensors of x's shape and dtype.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
    """
    check("x", x, x.shape, x.dtype)
    _check_size(x)
    check("residual", residual, x.shape, x.dtype)
    check("weight", weight, x.shape[-1:], x.dtype)
    return _add_rms_norm_op(x, residual, weight, eps)


@torch.library.custom_op("ddtree::rms_norm", mutates_args=())
def _rms_norm_op(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_norm(x, None, None, weight, out, eps)
    return out


@_rms_norm_op.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("ddtree::add_rms_norm", mutates_args=())
def _add_rms_norm_op(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total, out = torch.empty_like(x), torch.empty_like(x)
    _launch_norm(x, residual, total, weight, out, eps)
    return total, out


@_add_rms_norm_op.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _launch_norm(
    x: Tensor,
    residual: Tensor | None,
    total: Tensor | None,
    weight: Tensor,
    out: Tensor,
    eps: float,
) -> None:
    if not x.numel():
        return
    size, inner = x.shape[-1], x.shape[-2] if x.dim() > 1 else 1
    rows = x.numel() // size
    block = power_of_two(size)
    # A head is short: several share a program.
    group = max(1, min(power_of_two(rows), 1024 // block))
    _rms_norm[(-(-rows // group),)](
        x,
        outer_stride("x", x),
        inner,
        rows,
        size,
        x if residual is None else residual,
        out if total is None else total,
        weight,
        out,
        eps,
        RESIDUAL=residual is not None,
        ROWS=group,
        SIZE=block,
        num_warps=warps(group * block),
    )


@kernel
def _silu_mul(gate_up: Arg, out: Arg, size: Arg, SIZE: constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < size
    start = row * 2 * size + column
    gate = tl.load(gate_up + start, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + start + size, mask=inside, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * size + column, value.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor) -> Tensor:
    """SwiGLU's gate: `[..., 2I]` (gate, then up), contiguous, float -> `[..., I]`.

    Raises:
        ValueError: the tensor has another dtype or layout, or an odd width.
    """
    check("gate_up", gate_up, gate_up.shape, gate_up.dtype)
    if gate_up.dtype not in FLOATS or gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up: expected floats [..., 2I], got {describe(gate_up)}")
    return _silu_mul_op(gate_up)


@torch.library.custom_op("ddtree::silu_mul", mutates_args=())
def _silu_mul_op(gate_up: Tensor) -> Tensor:
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    if out.numel():
        block = min(1024, power_of_two(size))
        grid = (out.numel() // size, -(-size // block))
        _silu_mul[grid](gate_up, out, size, SIZE=block, num_warps=warps(block))
    return out


@_silu_mul_op.register_fake
def _(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


@kernel
def _rope(
    x: Arg,
    x_stride: Arg,
    cos: Arg,
    sin: Arg,
    out: Arg,
    out_stride: Arg,
    heads: Arg,
    half: Arg,
    HEADS: constexpr,
    HALF: constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, HALF)[None, :]
    narrow = column < half
    inside = (head < heads) & narrow
    place = head * 2 * half + column
    # Both halves are loaded before either is stored: `out` may be `x`.
    first = tl.load(x + token * x_stride + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(x + token * x_stride + place + half, mask=inside, other=0.0).to(tl.float32)
    angle = token * 2 * half + column
    cos1 = tl.load(cos + angle, mask=narrow, other=0.0)
    cos2 = tl.load(cos + angle + half, mask=narrow, other=0.0)
    sin1 = tl.load(sin + angle, mask=narrow, other=0.0)
    sin2 = tl.load(sin + angle + half, mask=narrow, other=0.0)
    target = out + token * out_stride + place
    turned = first * cos1 + second * sin1
    tl.store(target, turned.to(out.dtype.element_ty), mask=inside)
    turned = second * cos2 + first * sin2
    tl.store(target + half, turned.to(out.dtype.element_ty), mask=inside)


def rope(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
    """Rotate the halves of every head of `x [B, T, h, D]`, into `out` where given.

    x:        float32, float16 or bfloat16; its last two dimensions contiguous, the others evenly
              spaced, as heads cut out of longer heads are.
    cos, sin: [B, T, 1, D] float32, contiguous; the first half of `sin` is negated.
    out:      of x's shape and dtype, laid out like it; may be `x` itself.

    Raises:
        ValueError: a tensor has another shape, dtype or layout.
    """
    if x.dim() != 4 or x.shape[-1] % 2:
        raise ValueError(f"x: expected [B, T, heads, even D], got {describe(x)}")
    _check_size(x)
    batch, tokens, _, dim = x.shape
    check("cos", cos, (batch, tokens, 1, dim), torch.float32)
    check("sin", sin, (batch, tokens, 1, dim), torch.float32)
    if out is None:
        return _rope_op(x, cos, sin)
    if out.shape != x.shape or out.dtype != x.dtype:
        raise ValueError(f"out: expected {tuple(x.shape)} {x.dtype}, got {describe(out)}")
    outer_stride("out", out)
    if out is x:
        _rope_inplace_op(x, cos, sin)
    else:
        _rope_out_op(x, cos, sin, out)
    return out


@torch.library.custom_op("ddtree::rope", mutates_args=())
def _rope_op(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_rope(x, cos, sin, out)
    return out


@_rope_op.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@torch.library.custom_op("ddtree::rope_out", mutates_args=("out",))
def _rope_out_op(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    _launch_rope(x, cos, sin, out)


@_rope_out_op.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    return None


@torch.library.custom_op("ddtree::rope_inplace", mutates_args=("x",))
def _rope_inplace_op(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    _launch_rope(x, cos, sin, x)


@_rope_inplace_op.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    return None


def _launch_rope(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> None:
    batch, tokens, heads, dim = x.shape
    if not x.numel():
        return
    half = dim // 2
    wide = power_of_two(half)
    group = max(1, min(power_of_two(heads), 1024 // wide))
    _rope[(batch * tokens, -(-heads // group))](
        x,
        outer_stride("x", x),
        cos,
        sin,
        out,
        outer_stride("out", out),
        heads,
        half,
        HEADS=group,
        HALF=wide,
        num_warps=warps(group * wide),
    )


def _check_size(x: Tensor) -> None:
    outer_stride("x", x)
    if x.shape[-1] > MAX_SIZE:
        raise ValueError(f"x: expected rows of up to {MAX_SIZE}, got {describe(x)}")
