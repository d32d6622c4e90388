"""Weights in the blocked layout of a CPU library, whose products do not depend on the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class PackedLinear:
    """A weight `[O, I]` in a CPU library's blocked layout.

    With it every row of the product is computed alike whatever the number of rows, so that a
    token's logits do not depend on how many other tokens are verified beside it. `F.linear`
    changes its summation with the number of rows.
    """

    library: str
    """``"mkl"`` or ``"mkldnn"`` (oneDNN)."""
    shape: tuple[int, int]
    tensors: tuple[Tensor, ...]
    """The packed weight; for MKL also a view of the plain one's shape, never read."""

    def product(self, x: Tensor) -> Tensor:
        """`x [..., I]` -> `[..., O]`."""
        if self.library == "mkl":
            rows = x.numel() // self.shape[1]
            return torch.ops.mkl._mkl_linear.default(x, *self.tensors, None, rows)
        return torch.ops.mkldnn._linear_pointwise.default(x, *self.tensors, None, "none", [], "")


def packed_library(device: torch.device) -> str:
    """Name the CPU library whose prepacked linear works here, or "" for plain `F.linear`."""
    if device.type != "cpu":
        return ""
    weight = torch.arange(12, dtype=torch.float32).view(3, 4)
    for library in ("mkl", "mkldnn"):
        try:
            if torch.equal(pack(weight, library).product(weight), weight @ weight.T):
                return library
        except (RuntimeError, AttributeError):
            continue
    return ""


def pack(weight: Tensor, library: str) -> PackedLinear:
    """Lay a contiguous float32 `weight [O, I]` out for `library`."""
    shape = (weight.shape[0], weight.shape[1])
    if library == "mkl":
        # Laid out for 64 rows it is no slower at one, and at 17 to 64 a quarter faster than for 16.
        data = torch.ops.mkl._mkl_reorder_linear_weight(weight, 64)
        return PackedLinear(library, shape, (data, weight.new_zeros(1).expand(shape)))
    return PackedLinear(library, shape, (torch.ops.mkldnn._reorder_linear_weight(weight, 16),))
