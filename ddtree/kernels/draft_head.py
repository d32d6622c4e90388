"""The target's head in 8-bit integers, for drafts on CPU.

Drafting reads the whole head for a handful of rows, so its time is the memory's. What the integers
get wrong costs a little acceptance and never a token: the target verifies with its own head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.kernels.packed_linear import quantise

LEAST_WEIGHTS = 1 << 22
"""Smaller heads stay in the cache, and gain next to nothing: see docs/design.md."""


class DraftHead:
    """A head `[V, H]` in int8, a scale per row, whose products come from torch's quantised linear.

    Activations are quantised to 8 bits, too. Every row is scaled to its own largest value before,
    and one row with 1 and -1 is added, so that the quantisation of a row never depends on the
    rows beside it.

    Args:
        weight: [V, H] float32.

    Raises:
        RuntimeError: torch has no such linear here.
    """

    def __init__(self, weight: Tensor):
        self._packed = quantise(weight)
        self._ends = torch.zeros(1, weight.shape[1])
        self._ends[0, 0], self._ends[0, -1] = 1.0, -1.0

    def __call__(self, hidden: Tensor) -> Tensor:
        """`hidden [..., H]` float32 -> logits `[..., V]` float32."""
        rows = hidden.flatten(0, -2)
        largest = rows.abs().amax(1, keepdim=True).clamp_min_(1e-30)
        scaled = torch.cat((rows / largest, self._ends)).nan_to_num_(0.0)
        product = torch.ops.quantized.linear_dynamic(scaled, self._packed, True)
        return product[:-1].mul_(largest).view(*hidden.shape[:-1], -1)


def make_draft_head(weight: Tensor) -> DraftHead | None:
    """The head for drafts of a `weight [V, H]` float32; None where torch cannot do it."""
    try:
        head = DraftHead(weight)
        probe = torch.eye(2, weight.shape[1])
        near = torch.allclose(head(probe), probe @ weight.T, atol=0.05 * float(weight.abs().max()))
        return head if near else None
    except (RuntimeError, AttributeError):
        return None
