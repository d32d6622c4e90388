"""A round's choices by recursive rejection: what `verify="rejection"` puts in place of matching."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ddtree.kernels.sampling import filter_logits, process_logits
from ddtree.runtime.round_sampler import RoundSampler
from ddtree.runtime.sampler import path_tokens
from ddtree.tree.build import Tree
from ddtree.tree.rejection import sample_drafts, shape_weights, walk
from ddtree.tree.verify import Path

MAX_RANKS = 16
"""Most children of a node."""


@dataclass
class RejectionSampler(RoundSampler):
    """Samples the tree's tokens from the drafter, and accepts them by the target's probabilities.

    Eager only, on one device. Rounds without a draft, and first tokens, are chosen as ever.
    """

    matches: ClassVar[bool] = False
    q: Tensor | None = field(default=None, init=False)
    """[B, L, V] float32 the drafter's probabilities in this round."""

    def candidates(self, logits: Tensor, chain: bool) -> tuple[Tensor, Tensor]:
        """Candidates drawn without replacement, and the weights that fix the tree's shape."""
        assert self.row is not None
        count = 1 if chain else min(self.machine.num_candidates, MAX_RANKS)
        log_q = self._tempered(self.machine.vocab.spread(logits)).log_softmax(-1)
        self.q = log_q.exp()
        ids = sample_drafts(log_q, self.row.seed, self.row.length, count)
        weights = shape_weights(ids.shape[1], count, ids.device)
        return ids, weights.expand(ids.shape).contiguous()

    def verify(
        self, hidden: Tensor, tree: Tree, positions: Tensor, chain: bool
    ) -> tuple[Path, Tensor]:
        """Walk the tree; see `RoundSampler.verify`."""
        assert self.row is not None and self.q is not None and self.sampling is not None
        sampling, batch = self.sampling, torch.arange(hidden.shape[0], device=hidden.device)
        paths = path_tokens(tree, self.depths - 1)

        def law(nodes: Tensor) -> Tensor:
            logits = self.machine.target.logits(hidden[batch, nodes][:, None])
            if sampling.adjustments is not None:
                places, above = positions[batch, nodes] + 1, paths[batch, nodes]
                process_logits(logits, places[:, None], above[:, None], sampling.adjustments)
            logits = filter_logits(logits, sampling.filters)
            sampled, logits = self._tempered(logits).softmax(-1)[:, 0], logits[:, 0]
            greedy = torch.zeros_like(logits).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
            return torch.where(sampling.filters.temperature[:, None] > 0, sampled, greedy)

        ranks = 1 if chain else min(self.machine.num_candidates, MAX_RANKS)
        return walk(tree, law, self.q, self.row.seed, self.row.length, ranks)

    def _tempered(self, logits: Tensor) -> Tensor:
        """`logits [B, N, V]` over the temperature, the best being 0: nothing overflows."""
        assert self.sampling is not None
        temperature = self.sampling.filters.temperature[:, None, None]
        shifted = logits - logits.amax(-1, keepdim=True)
        return shifted / torch.where(temperature > 0, temperature, 1.0)
