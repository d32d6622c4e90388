"""Largest entries of wide rows on CPU, where torch's own argmax and topk look at every entry twice.

Both find the best blocks of a row by `amax`, which runs at the memory's speed, and look only there.
"""

from __future__ import annotations

from torch import Tensor

LEAST_BLOCKS = 64
"""Rows of fewer blocks gain nothing."""
WIDTHS = (256, 128, 64)
"""Block sizes; the first one that divides the row is taken."""


def argmax(x: Tensor) -> Tensor:
    """As `x.argmax(-1)`, the first one of equal entries (or of NaNs): `[..., V]` -> `[...]`."""
    width = _width(x)
    if not width:
        return x.argmax(-1)
    blocks = x.unflatten(-1, (-1, width))
    best = blocks.amax(-1).argmax(-1)
    return _take(blocks, best[..., None]).argmax(-1) + best * width


def topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """As `x.topk(count, -1)`: values and indices `[..., count]`, descending."""
    width = _width(x)
    if not width or count * width * 2 > x.shape[-1]:
        values, indices = x.topk(count, -1)
        return values, indices
    blocks = x.unflatten(-1, (-1, width))
    best = blocks.amax(-1).topk(count, -1).indices
    values, place = _take(blocks, best).topk(count, -1)
    return values, best.gather(-1, place // width) * width + place % width


def _width(x: Tensor) -> int:
    size = x.shape[-1]
    fits = (w for w in WIDTHS if size % w == 0 and size >= LEAST_BLOCKS * w)
    return next(fits, 0) if x.device.type == "cpu" else 0


def _take(blocks: Tensor, which: Tensor) -> Tensor:
    index = which[..., None].expand(*which.shape, blocks.shape[-1])
    return blocks.gather(-2, index).flatten(-2)
