"""Random weights in place of a checkpoint's: for timing shapes whose files are not at hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ddtree.config import DraftConfig, ModelConfig
from ddtree.kernels.reference import TorchOps
from ddtree.models.dflash import DFlash
from ddtree.models.layers import ROPE_MARGIN
from ddtree.models.llama import Llama
from ddtree.parallel import SINGLE, Parallel, Part

SPREAD = 0.02
"""Standard deviation of the weights; norms are 1."""


class DummyCheckpoint:
    """Answers a model's `load` as a `Checkpoint` would, with tensors made on the device.

    On the meta device they have no content.
    """

    folder = "dummy"

    def __init__(self, ops: TorchOps, device: torch.device, dtype: torch.dtype):
        self.ops, self.device, self.dtype = ops, device, dtype

    def __contains__(self, name: str) -> bool:
        return True

    def read(self, name: str, shape: tuple[int | Part, ...]) -> Tensor:
        """A tensor of `shape`: ones for norms (one dimension), else normal."""
        sizes = [Part.of(part).size for part in shape]
        out = torch.empty(sizes, dtype=self.dtype, device=self.device)
        return out.fill_(1.0) if len(shape) == 1 else out.normal_(0.0, SPREAD)

    def tied(self, name: str, shape: tuple[int | Part, int]) -> tuple[Tensor, Any]:
        """A tensor as a lookup table, and packed."""
        table = self.read(name, shape)
        return table, self.ops.pack_linear(table)

    def stack(self, rows: Mapping[str, int | Part]) -> Tensor:
        """Biases `[sum of rows]` of zeros."""
        return torch.zeros(_count(rows), dtype=self.dtype, device=self.device)

    def pack(
        self, rows: Mapping[str, int | Part], in_features: int | Part, exact: bool = False
    ) -> Any:
        """A packed weight `[sum of rows, in_features]`."""
        return self.ops.pack_linear(self.read(next(iter(rows)), (_count(rows), in_features)))

    def ignore(self, name: str, shape: tuple[int | Part, ...] | None = None) -> None:
        """Nothing to account for."""


def _count(rows: Mapping[str, int | Part]) -> int:
    return sum(Part.of(part).size for part in rows.values())


def dummy_models(
    target: ModelConfig,
    draft: DraftConfig | None,
    kind: type[Llama],
    ops: TorchOps,
    device: torch.device,
    dtype: torch.dtype,
    parallel: Parallel = SINGLE,
) -> tuple[Llama, DFlash | None]:
    """Build a target of class `kind` and its drafter with random weights."""
    checkpoint: Any = DummyCheckpoint(ops, device, dtype)
    built = kind(target, ops, device, dtype, parallel=parallel)
    some = None if draft is None else draft.draft_vocab_size
    built.load(checkpoint, draft is not None, None if some is None else torch.arange(some))
    if draft is None:
        return built.eval(), None
    positions = target.max_position_embeddings + ROPE_MARGIN
    drafter = DFlash(draft, ops, device, dtype, positions, parallel)
    drafter.load(checkpoint)
    return built.eval(), drafter.eval()
