"""The target's head in 8-bit integers, for drafts on CPU.

Drafting reads the whole head for a handful of rows, so its time is the memory's. What the integers
get wrong costs a little acceptance and never a token: the target verifies with its own head.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

LEAST_WEIGHTS = 1 << 22
"""Smaller heads stay in the cache, and gain next to nothing: see docs/design.md."""
ROWS = 4096
"""Vocabulary rows that are quantised at once."""


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
        scales = weight.abs().amax(1).clamp_min_(1e-12) / 127
        levels = torch.empty_like(weight, dtype=torch.int8)
        for start in range(0, len(weight), ROWS):
            rows = slice(start, start + ROWS)
            levels[rows] = (weight[rows] / scales[rows, None]).round_().to(torch.int8)
        zeros = torch.zeros(len(weight), dtype=torch.int64)
        before = torch.backends.quantized.engine
        try:
            torch.backends.quantized.engine = "x86"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                whole = torch._make_per_channel_quantized_tensor(levels, scales.double(), zeros, 0)
            self._packed = torch.ops.quantized.linear_prepack(whole, None)
        finally:
            torch.backends.quantized.engine = before
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
