"""What launchers share: checks with a named error, and sizes that kernels are compiled for."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def describe(tensor: Tensor) -> str:
    """Shape, dtype and strides, for messages."""
    return f"{tuple(tensor.shape)} {tensor.dtype}, strides {tensor.stride()}"


def check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Raise ValueError unless the tensor is contiguous, of this shape and dtype."""
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: expected {tuple(shape)} {dtype}, contiguous, got {describe(tensor)}"
        )


def check_logits(logits: Tensor) -> None:
    """Raise ValueError unless `logits` are floats [B, N, V], contiguous."""
    if logits.dim() != 3 or logits.dtype not in FLOATS or not logits.is_contiguous():
        raise ValueError(
            "logits: expected [B, N, V] in float32, float16 or bfloat16, contiguous, got "
            + describe(logits)
        )


def outer_stride(name: str, x: Tensor) -> int:
    """Elements between the blocks `[heads, size]` of x's last two dimensions.

    Raises:
        ValueError: those dimensions are not packed, or the blocks not evenly spaced.
    """
    last = x.shape[-2:].numel()
    packed = x.stride(-1) == 1 and (x.dim() < 2 or x.shape[-2] == 1 or x.stride(-2) == x.shape[-1])
    stride, reach = None, 0
    for i in reversed(range(x.dim() - 2)):
        if x.shape[i] == 1:
            continue
        packed = packed and (stride is None or x.stride(i) == reach)
        stride = x.stride(i) if stride is None else stride
        reach = x.stride(i) * x.shape[i]
    if x.dtype not in FLOATS or not packed:
        raise ValueError(f"{name}: expected floats, rows packed and even, got {describe(x)}")
    return last if stride is None else stride


def power_of_two(size: int) -> int:
    """The least power of two that is not below `size`."""
    return 1 << max(size - 1, 0).bit_length()


def warps(elements: int) -> int:
    """Warps for a program that holds so many elements: about eight in each thread."""
    return max(1, min(16, elements // 256))
