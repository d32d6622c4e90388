"""Recursive rejection over a tree whose tokens are sampled: the alternative to matching choices."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ddtree.tree.build import Tree
from ddtree.tree.noise import gumbel, token_bits
from ddtree.tree.verify import Path

Law = Callable[[Tensor], Tensor]
"""Nodes [B] -> the target's probabilities [B, V] of the token after each."""

# Three streams of random numbers beside each other, and beside the one of plain sampling.
_DRAFT, _TEST, _FINAL = 0x5851F42D4C957F2D, 0x2545F4914F6CDD1D, 0x14057B7EF767814F

FIRST_RANK, NEXT_RANK = 0.5, 0.5
"""A sampled candidate is taken to be right half of the time, and the next one half as often."""


def shape_weights(depths: int, ranks: int, device: torch.device) -> Tensor:
    """Weights [L, K] that fix a tree's shape before its tokens are known."""
    order = torch.arange(ranks, dtype=torch.float32, device=device)
    return (math.log(FIRST_RANK) + order * math.log(NEXT_RANK)).expand(depths, ranks)


def sample_drafts(log_q: Tensor, seeds: Tensor, length: Tensor, count: int) -> Tensor:
    """Sample candidates without replacement, in the order drawn: ids [B, L, K] int64.

    log_q:  [B, L, V] float32 the drafter's tempered log-probabilities, up to a constant.
    seeds:  [B] int64.
    length: [B] int64 position of the root.
    count:  K.

    The largest of `log q + g` are such a sample (Gumbel-top-k; Kool, van Hoof & Welling,
    "Stochastic beams and where to find them", ICML 2019). All nodes of a depth have their children
    from the same list: what is decided at one depth tells nothing of the noise of another.
    """
    positions = length.unsqueeze(1) + torch.arange(1, log_q.shape[1] + 1, device=length.device)
    return (log_q + gumbel(seeds ^ _DRAFT, positions, 0, log_q.shape[2])).topk(count, -1).indices


def walk(
    tree: Tree, law: Law, q: Tensor, seeds: Tensor, length: Tensor, ranks: int
) -> tuple[Path, Tensor]:
    """Accept or reject children one after the other, from the root on.

    tree:   its nodes' candidates from `sample_drafts`, its shape fixed before.
    law:    the target's probabilities after nodes, all filters applied.
    q:      [B, L, V] the drafter's probabilities that the candidates were sampled from.
    seeds:  [B] int64; length: [B] int64 position of the root.
    ranks:  K, the most children that a node has.

    Returns the path, and the tokens [B, L + 1] int64 emitted at each of its nodes: those of the
    path below the root, then a last one; what follows it means nothing. Eager: it looks at values.

    A child x is accepted with probability `min(1, p(x) / q(x))`. If it is not, p becomes the
    normalised positive part of p - q, and q loses x and is normalised: exactly the law of the
    target for any number of children (SpecTr, Sun et al. 2023; SpecInfer, Miao et al. 2024; without
    replacement: Jeon et al. 2024, "Recursive speculative decoding").
    """
    batch, depths, _ = q.shape
    children = _children(tree, ranks)
    rows = torch.arange(batch, device=length.device)
    order = torch.arange(depths + 1, device=length.device)
    positions = length.unsqueeze(1) + 1 + order
    ids = torch.arange(ranks, device=length.device).expand(batch, depths, ranks)
    bits = token_bits(seeds ^ _TEST, positions[:, :depths], ids).view(torch.uint32)
    uniform = (bits.double() + 0.5) * 2.0**-32

    node = torch.zeros_like(length)
    alive = torch.ones_like(length, dtype=torch.bool)
    count = torch.ones_like(length)
    nodes = length.new_zeros(batch, depths + 1)
    tokens = length.new_zeros(batch, depths + 1)
    rest = law(node).double()
    for depth in range(depths):
        left = q[:, depth].double()
        taken = torch.zeros_like(alive)
        for rank in range(ranks):
            child = children[rows, node, rank]
            tested = alive & ~taken & (child > 0)
            token = tree.tokens[rows, child]
            ratio = rest[rows, token] / left[rows, token].clamp_min(1e-300)
            passed = tested & (uniform[:, depth, rank] < ratio)
            failed = tested & ~passed
            reduced = _normalised((rest - left).clamp_min(0.0), rest)
            rest = torch.where(failed[:, None], reduced, rest)
            left = left.scatter(1, token[:, None], 0.0)
            left = _normalised(left, left)
            taken |= passed
            nodes[:, depth + 1] = torch.where(passed, child, nodes[:, depth + 1])
        alive &= taken
        count += alive
        node = torch.where(alive, nodes[:, depth + 1], node)
        tokens[:, depth] = torch.where(alive, tree.tokens[rows, node], tokens[:, depth])
        if not bool(alive.any()):
            break
        rest = torch.where(alive[:, None], law(node).double(), rest)
    last = positions.gather(1, (count - 1)[:, None])
    noise = gumbel(seeds ^ _FINAL, last, 0, q.shape[2])[:, 0]
    final = (rest.log() + noise).argmax(-1)
    tokens.scatter_(1, (count - 1)[:, None], final[:, None])
    return Path(nodes=nodes, count=count), tokens


def _children(tree: Tree, ranks: int) -> Tensor:
    """The child of each node by rank, 0 where there is none: [B, N, K] int64."""
    batch, nodes = tree.tokens.shape
    order = torch.arange(nodes, device=tree.tokens.device).expand(batch, nodes)
    real = tree.valid & (order > 0)
    # What is not a child goes to the root's own place at an extra rank.
    place = torch.where(real, tree.parents * (ranks + 1) + tree.ranks, ranks)
    table = tree.tokens.new_zeros(batch, nodes * (ranks + 1))
    return table.scatter_(1, place, order * real).view(batch, nodes, ranks + 1)[:, :, :ranks]


def _normalised(x: Tensor, otherwise: Tensor) -> Tensor:
    """`x [B, V]` scaled to sum 1; rows that are all 0 (only by rounding) as in `otherwise`."""
    total = x.sum(-1, keepdim=True)
    return torch.where(total > 0, x / total.clamp_min(1e-300), otherwise)
