"""Choices over the target's vocabulary, whichever ranks have its parts.

Where one rank has all of it, these are the ops themselves. Otherwise a choice is one all-reduce of
integers and candidates are one all-gather: the same tokens on every rank, and at every size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ddtree.kernels.sampling import (
    Filters,
    Reduce,
    filter_threshold,
    rank_candidates,
    token_logprobs,
)
from ddtree.kernels.shards import (
    chosen_ids,
    local_candidates,
    local_logprobs,
    merge_candidates,
    merge_logprobs,
    pack_candidates,
)

OUT_OF_REACH = -1e30
"""Logit of a token that is not drafted: below all others with any noise, and still a number."""


class Vocabulary:
    """The vocabulary of a target and its kernel set.

    Attributes:
        total: V, all tokens.
        first: this rank's first token.
        size: how many it has.
        widest: the largest size of any rank: what all ranks divide their work by.
    """

    def __init__(self, target: Any, ops: Any):
        self.target, self.ops, self.parallel = target, ops, target.parallel
        part = target.vocab
        self.total, self.first, self.size = part.total, part.start, part.size
        self.widest = self.parallel.widest(part.total)
        self._alone = part.whole
        self._drafted = target.draft_tokens

    @property
    def reducers(self) -> tuple[Reduce | None, Reduce | None]:
        """Sum and maximum over the shards, for the filters; None each where there is one."""
        return (None, None) if self._alone else (self.parallel.all_sum, self.parallel.all_max)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final hidden states `[..., H]` -> float32 logits `[..., size]` of this rank's tokens."""
        return self.target.logits(hidden)

    def narrow(self, noise: Tensor | None) -> tuple[Tensor, Tensor | None] | None:
        """Where drafts are of some tokens, and can be chosen among those alone: which, `[n]`, and
        their `noise [B, L, size]`; else None, and `spread` is needed."""
        if self._drafted is None or not self._alone or self.ops.fused:
            return None
        return self._drafted, None if noise is None else noise.index_select(2, self._drafted)

    def spread(self, logits: Tensor) -> Tensor:
        """Drafting logits `[B, L, n]` of some tokens -> `[B, L, size]`, all others out of reach."""
        if self._drafted is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.size), OUT_OF_REACH)
        return whole.index_copy_(-1, self._drafted, logits)

    def argmax(self, logits: Tensor) -> Tensor:
        """Most likely token per row of `logits [..., size]` -> `[...]`, lowest id on a tie."""
        return self.agree([self.choice(logits)])

    def choice(
        self,
        logits: Tensor,
        filters: Filters | None = None,
        seeds: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """This rank's say in the choice of a token per row of `logits [..., size]`, for `agree`.

        filters, seeds, positions: what fused ops filter `logits [B, N, size]` and make noise by.
        """
        given = () if seeds is None else (filters, seeds, positions)
        if self._alone:
            return self.ops.choose_tokens(logits, *given) if given else self.ops.argmax(logits)
        least = None
        if filters is not None and (filters.top_k, filters.top_p, filters.min_p) != (None,) * 3:
            least = filter_threshold(logits, filters, *self.reducers)
        if not given:
            return self.ops.local_choice(logits, self.first)
        return self.ops.local_choice(logits, self.first, *given, least)

    def agree(self, choices: Sequence[Tensor]) -> Tensor:
        """The tokens `[n]` that `choices`, end to end, come to over all ranks: one all-reduce."""
        own = choices[0] if len(choices) == 1 else torch.cat(tuple(choices))
        return own if self._alone else chosen_ids(self.parallel.all_max(own))

    def top_candidates(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` most likely tokens per row of `logits [B, L, size]`, ids and log-probs."""
        if self._alone:
            return self.ops.top_candidates(logits, count)
        found = self.ops.local_candidates(logits, None, count, self.first)
        return self._merge(found, None, count, None)

    def rank_candidates(
        self,
        logits: Tensor,
        temperature: Tensor,
        count: int,
        noise: Tensor | None = None,
        alpha: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """`kernels.sampling.rank_candidates` of `logits [B, L, size]`."""
        if self._alone:
            if noise is None and self.ops.fused:
                return self.ops.rank_candidates(logits, temperature, count)
            return rank_candidates(logits, temperature, count, noise, alpha, scale)
        if noise is None:
            found = self.ops.local_candidates(logits, temperature, count, self.first)
        else:
            found = local_candidates(logits, temperature, count, self.first, noise, alpha)
        return self._merge(found, temperature, count, scale)

    def rank_seeded(
        self,
        logits: Tensor,
        temperature: Tensor,
        count: int,
        seeds: Tensor,
        positions: Tensor,
        alpha: Tensor,
        scale: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """As `rank_candidates`, with the noise of `seeds [B]` at `positions [B, L]`; fused only."""
        noise = (seeds, positions, alpha)
        if self._alone:
            return self.ops.rank_candidates(logits, temperature, count, *noise, scale)
        found = self.ops.local_candidates(logits, temperature, count, self.first, *noise)
        return self._merge(found, temperature, count, scale)

    def token_logprobs(
        self, logits: Tensor, chosen: Tensor, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`kernels.sampling.token_logprobs` of `logits [..., size]`."""
        if self._alone:
            return token_logprobs(logits, chosen, count)
        width = min(count, self.widest)
        mine = local_logprobs(logits, chosen, count, self.first, width)
        return merge_logprobs(self.parallel.all_gather(mine), count)

    def _merge(
        self,
        found: tuple[Tensor, Tensor, Tensor],
        temperature: Tensor | None,
        count: int,
        scale: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        mine = pack_candidates(*found, min(count, self.widest))
        return merge_candidates(self.parallel.all_gather(mine), temperature, count, scale)
