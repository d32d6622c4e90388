"""What a benchmark of kernels runs and compares: trees, candidates, choices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from kernel_trials import Trial, Trials, Triple
from torch import Tensor

from ddtree.kernels.filter_threshold import filter_threshold
from ddtree.kernels.sampling import Filters, rank_candidates
from ddtree.kernels.sampling import filter_threshold as torch_threshold
from ddtree.tree import build_tree
from ddtree.tree.noise import gumbel


class TokenTrials(Trials):
    """Adds the trials of the kernels that choose tokens."""

    def tree(self, nodes: int) -> Trial:
        """The round's tree; equal in every bit."""
        arguments, tree = self.tree_inputs(nodes)

        def check() -> list[Triple]:
            names = ("tokens", "parents", "depths", "ranks", "scores", "valid", "words")
            theirs = [getattr(tree, name) for name in names]
            return [
                (a != b, b != b, torch.zeros(()))
                for a, b in zip(self.ops.build_tree(*arguments), theirs, strict=True)
            ]

        return Trial(lambda: self.ops.build_tree(*arguments), lambda: build_tree(*arguments), check)

    def candidates(self, count: int) -> Trial:
        """Candidates of a coupled tree; torch makes the noise of all depths first."""
        depth, vocab = self.sizes.block - 1, self.sizes.vocab
        logits = self.randn(1, depth, vocab, dtype=torch.float32).mul_(3)
        heat = torch.full((1,), 0.8, device=self.device)
        seeds = torch.full((1,), 11, device=self.device)
        places = torch.arange(depth, device=self.device)[None] + 100
        alpha, scale = torch.rand(2, depth, device=self.device) + 0.5

        def theirs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
            noise = gumbel(seeds, places, 0, vocab).to(dtype) * heat[:, None, None].to(dtype)
            numbers = (x.to(dtype) for x in (alpha, scale))
            return rank_candidates(logits.to(dtype), heat.to(dtype), count, noise, *numbers)

        def ours() -> tuple[Tensor, Tensor]:
            return self.ops.rank_candidates(logits, heat, count, seeds, places, alpha, scale)

        def check() -> list[Triple]:
            ids, weights = ours()
            exact = theirs(torch.float64)
            # Candidates that another one took the place of count as wrong by their number.
            missing = (ids.sort(-1).values != exact[0].sort(-1).values).sum().float()
            zero = torch.zeros_like(missing)
            return [(weights, theirs()[1], exact[1]), (missing, zero, zero)]

        # The noise itself differs by a few ulp.
        return Trial(ours, theirs, check, slack=1e-5)

    def choice(self, kind: str, nodes: int) -> Trial:
        """Choosing tokens, or the threshold of what may be chosen."""
        vocab = self.sizes.vocab
        logits = self.randn(1, nodes, vocab, dtype=torch.float32).mul_(3)
        heat = torch.full((1,), 0.8, device=self.device)
        seeds = torch.full((1,), 11, device=self.device)
        places = torch.arange(nodes, device=self.device)[None] + 100
        if kind.startswith("threshold"):
            top_k = torch.full((1,), min(50, vocab), device=self.device)
            filters = Filters(heat, top_k, torch.full_like(heat, 0.9))

            def limits() -> list[Triple]:
                theirs = torch_threshold(logits, filters)
                return [(filter_threshold(logits, filters), theirs, theirs.double())]

            return Trial(
                lambda: filter_threshold(logits, filters),
                lambda: torch_threshold(logits, filters),
                limits,
                slack=1e-3,
            )
        if kind == "argmax":

            def both(ops: Any) -> Callable[[], Tensor]:
                return lambda: ops.argmax(logits)

            ours, theirs, perturbed = both(self.ops), both(self.plain), logits
        else:
            # As in a round: one row of noise per depth, given to the nodes of that depth.
            places = torch.arange(nodes, device=self.device)[None] % self.sizes.block + 100
            depths = torch.arange(min(nodes, self.sizes.block), device=self.device)[None] + 100

            def noisy() -> Tensor:
                noise = gumbel(seeds, depths, 0, vocab) * heat[:, None, None]
                return noise[0].index_select(0, places[0] - 100)[None].add_(logits)

            def ours() -> Tensor:
                return self.ops.choose_tokens(logits, Filters(heat), seeds, places)

            def theirs() -> Tensor:
                return noisy().argmax(-1)

            perturbed = noisy()

        def check() -> list[Triple]:
            # By value: where two are a few ulp apart, either may be chosen.
            got = (perturbed.gather(2, one()[:, :, None]) for one in (ours, theirs))
            return [(*got, perturbed.amax(-1, keepdim=True).double())]

        return Trial(ours, theirs, check, slack=1e-5)
