"""Offline acceptance: what a greedy chain would accept on held-out greedy answers."""

from __future__ import annotations

import torch
from torch import Tensor

from .batches import Item, make_batch, walks
from .drafter import TrainableDrafter
from .target import TargetWeights


@torch.no_grad()
def proxy_sums(
    model: TrainableDrafter, target: TargetWeights, items: list[Item], limit: int
) -> Tensor:
    """Walk held-out greedy answers as the engine would, drafting at every anchor.

    The corpus answer is the target's own greedy output, so the walk `position += accepted + 1` is
    what a chain round does, up to floating-point near-ties; what the last round accepts beyond the
    limit does not count.

    Returns:
        float64 `[3 + L]`: tokens emitted, rounds, anchors seen, and per depth the anchors at which
        the draft was right that deep.
    """
    config = model.config
    depth = config.block_size - 1
    sums = torch.zeros(3 + depth, dtype=torch.float64)
    for item, anchors in walks(items, limit):
        batch = make_batch(
            [item], [anchors], config.block_size, config.mask_token_id, torch.ones(depth)
        ).to(target.head.device)
        embeddings = target.embedding[batch.blocks]
        hidden = model(embeddings, batch.features, batch.positions)[0, :, 1:]
        runs = torch.zeros(len(anchors), depth, dtype=torch.int64, device=hidden.device)
        alive = torch.arange(len(anchors), device=hidden.device)
        for d in range(depth):  # the head is the dear part: deeper rows only where all were right
            choice = (hidden[alive, d] @ target.head.t()).argmax(-1)
            right = (choice == batch.labels[0, alive, d]) & (batch.weights[0, alive, d] > 0)
            alive = alive[right]
            runs[alive, d] = 1
        accepted = runs.sum(dim=-1).tolist()
        at, rounds = 0, 0
        while at < len(accepted):
            at += accepted[at] + 1
            rounds += 1
        sums[0] += len(accepted)
        sums[1] += rounds
        sums[2] += len(accepted)
        sums[3:] += runs.sum(dim=0).cpu()
    return sums
