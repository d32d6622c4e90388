"""The training loss: cross-entropy and distillation over a sampled part of the vocabulary."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class SampledHead:
    """The target's frozen head, cut per step to the tokens that matter and a random rest.

    Always in: the `common` most frequent corpus tokens and the labels of the step. `negatives`
    more are drawn without replacement from all other tokens, and each of them stands for
    `others / negatives` tokens: the log of that is added to its logit, so the partition function
    is estimated without bias (importance-corrected sampled softmax, Jean et al. 2015).
    """

    def __init__(self, head: Tensor, counts: Tensor, common: int = 2048, negatives: int = 2048):
        self.head = head
        self.negatives = negatives
        order = counts.argsort(descending=True, stable=True)
        self.common = order[:common].to(head.device)

    @torch.no_grad()
    def draw(self, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """Candidates of a step for labels of any shape.

        Returns:
            weight `[C, H]`, log-correction `[C]`, and the labels as indices into the candidates.
        """
        size, device = self.head.shape[0], self.head.device
        fixed = torch.zeros(size, dtype=torch.bool, device=device)
        fixed[self.common] = True
        fixed[labels.flatten()] = True
        others = (~fixed).nonzero().flatten()
        kept = torch.randperm(len(others), generator=generator)[: self.negatives].to(device)
        ids = torch.cat((fixed.nonzero().flatten(), others[kept]))
        correction = torch.zeros(len(ids), device=device)
        if len(kept):
            correction[len(ids) - len(kept) :] = math.log(len(others) / len(kept))
        index = torch.zeros(size, dtype=torch.int64, device=device)
        index[ids] = torch.arange(len(ids), device=device)
        return self.head[ids], correction, index[labels]


def block_loss(
    hidden: Tensor,
    teacher: Tensor | None,
    labels: Tensor,
    weights: Tensor,
    distill: Tensor,
    head: SampledHead,
    generator: torch.Generator,
) -> Tensor:
    """Weighted mean loss of mask rows.

    Args:
        hidden: `[R, H]` drafter states of the mask rows, after its final norm.
        teacher: `[R, H]` the target's states that chose the same tokens, after its final norm;
            None trains on the labels alone.
        labels: `[R]` corpus tokens.
        weights: `[R]` weight of each row; 0 leaves it out.
        distill: `[R]` share of the distillation term (the rest is cross-entropy).
    """
    live = weights > 0
    hidden, labels, weights = hidden[live], labels[live], weights[live]
    weight, correction, index = head.draw(labels, generator)
    log_q = torch.log_softmax(hidden @ weight.t() + correction, dim=-1)
    hard = -log_q.gather(1, index[:, None]).squeeze(1)
    if teacher is None:
        return (hard * weights).sum() / weights.sum()
    with torch.no_grad():
        p = torch.softmax(teacher[live] @ weight.t() + correction, dim=-1)
    soft = -(p * log_q).sum(dim=-1)
    share = distill[live]
    return ((hard * (1 - share) + soft * share) * weights).sum() / weights.sum()
