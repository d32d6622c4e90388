"""What the steps of an engine run on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ddtree.runtime.sampler import TreeWeights
from ddtree.runtime.vocabulary import Vocabulary


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
    weights: TreeWeights | None = None
    """How candidates are ranked and weighted; None: by the drafter's log-probabilities alone."""

    rejection: bool = False
    """Whether sampled rows accept drafts by recursive rejection instead of matching choices."""

    threshold: float | None = None
    """Least probability of a tree node, where the host can see it; None: all nodes are used."""

    vocab: Vocabulary = field(init=False)
    """What chooses among the target's tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "vocab", Vocabulary(self.target, self.ops))

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose residual streams feed the drafter."""
        return () if self.drafter is None else self.drafter.config.target_layer_ids
