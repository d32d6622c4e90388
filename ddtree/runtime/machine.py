"""What the steps of an engine run on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ddtree.runtime.sampler import Calibration


@dataclass(frozen=True)
class Machine:
    """What a step runs on; the same for every step of an engine."""

    target: Any
    drafter: Any | None
    ops: Any
    target_kv: Tensor
    """[layers, slots, 2, Hkv, D]."""
    draft_kv: Tensor | None
    page_size: int
    num_candidates: int
    """K: candidates kept per depth."""
    calibration: Calibration | None = None
    """How sampled rows' candidates are ranked with the noise; None: without it."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose residual streams feed the drafter."""
        return () if self.drafter is None else self.drafter.config.target_layer_ids
