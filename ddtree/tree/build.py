"""Builds draft trees on the device, with fixed shapes and without ever asking the host."""

import math
import sys
from dataclasses import dataclass, fields
from functools import cache

import torch
from torch import Tensor

# A key is one int64: the bits of a float32 cost (= -score >= 0, whose bits sort like the number) in
# the high half, a running number in the low half. Smallest key first is best score first, with
# ties decided by the number. The cost half is read and written in place through a float32 view.
_COST_HALF = 1 if sys.byteorder == "little" else 0
_NUMBER_MASK = 0xFFFFFFFF
_INFINITE_COST = 0x7F800000 << 32


@dataclass
class Tree:
    """Draft trees of B rows, N nodes each; node 0 is the anchor.

    Nodes are ordered by score (descending), then depth, order of the parent and rank (ascending),
    so a parent always comes before its children. Nodes that a row does not use are filler: not
    valid, token = the anchor, parent 0, depth 0, rank 0, score -inf.

    tokens:  [B, N] int64.
    parents: [B, N] int64, node index; 0 for the root itself.
    depths:  [B, N] int64, 0 for the root.
    ranks:   [B, N] int64, place among the candidates of the node's depth, best = 0.
    scores:  [B, N] float32, sum of the weights on the path; 0 for the root.
    valid:   [B, N] bool.
    words:   [B, N, W] int64, W = ceil(N / 64): bit j % 64 of word j // 64 says that node j is an
             ancestor of this node or the node itself. A filler node has the root and itself.
    """

    tokens: Tensor
    parents: Tensor
    depths: Tensor
    ranks: Tensor
    scores: Tensor
    valid: Tensor
    words: Tensor


def build_tree(
    anchor: Tensor, ids: Tensor, weights: Tensor, num_nodes: int, budget: Tensor | None = None
) -> Tree:
    """Build the tree of the `num_nodes - 1` best prefixes below the anchor, for every row.

    A prefix takes one candidate at each of its depths; its score is the float32 sum of their
    weights, added from the root down. Weights are cleaned first: NaN becomes -inf, a positive
    weight and -0 become +0. A prefix of score -inf is never a node.

    anchor:  [B] int64.
    ids:     [B, L, K] int64, candidate tokens per depth, distinct within a depth.
    weights: [B, L, K] float32; each depth's cleaned weights must be non-increasing. Otherwise the
             result is still a well-formed tree, but perhaps not the best one, nor its ties in
             order.
    num_nodes: N, nodes including the root.
    budget:  [B] int64 from 0 to N - 1, nodes below the root that a row may use; None: all.

    The set is that of the best-first heap of "Accelerating Speculative Decoding with Block
    Diffusion Draft Trees" (arXiv 2604.12989), found without a heap: the best prefixes of each
    depth are made from those of the depth above, and the tree is the best of all of them.
    """
    batch, depth, width = ids.shape
    assert weights.shape == ids.shape and weights.dtype == torch.float32
    plan = _plan(depth, width, num_nodes, ids.device)

    # 0 - w rather than -w: it turns both zeros into +0, whose bits are the smallest key.
    costs = (0.0 - weights.flatten(1)).clamp_(min=0.0).nan_to_num_(nan=torch.inf, posinf=torch.inf)
    keys = plan.keys.repeat(batch, 1)
    first, last = 2 + _COST_HALF, 2 * plan.num_pairs + 2
    pair_costs = keys.view(torch.float32)[:, first:last:2]
    pair_costs.copy_(costs.index_select(1, plan.candidates))
    key_blocks = keys.split(plan.key_blocks, 1)
    lists = [key_blocks[0]]  # the root and depth 1, whose candidates come sorted
    cost_blocks = pair_costs.split(plan.cost_blocks, 1)
    for d, step in enumerate(plan.steps, start=1):
        above_costs = lists[-1].view(torch.float32).index_select(1, step.parent_costs)
        cost_blocks[d].add_(above_costs)
        block = key_blocks[d]
        lists.append(block.topk(step.kept, 1, largest=False)[0] if step.unsorted else block)
    if plan.padding:
        lists.append(key_blocks[-1])
    best, picked = torch.cat(lists, 1).topk(num_nodes, 1, largest=False)

    if budget is not None:
        best = best.masked_fill(plan.order > budget.unsqueeze(1), _INFINITE_COST)
    valid = best < _INFINITE_COST
    # Entry 0 of the table is the root's; filler nodes read the same one.
    entries = ((best & _NUMBER_MASK) * valid).view(-1)
    sources, above, depths, ranks = (
        plan.table.index_select(1, entries).view(4, batch, num_nodes).unbind(0)
    )
    nodes = picked.new_zeros(batch, plan.num_listed)
    nodes.scatter_(1, picked, plan.order.expand(batch, num_nodes))
    parents = nodes.gather(1, above)
    return Tree(
        tokens=torch.cat([anchor.unsqueeze(1), ids.flatten(1)], 1).gather(1, sources),
        parents=parents,
        depths=depths,
        ranks=ranks,
        scores=0.0 - best.view(torch.float32)[:, _COST_HALF::2],
        valid=valid,
        words=_ancestor_words(parents, plan.deepest),
    )


def trim_tree(tree: Tree, threshold: float) -> Tree:
    """The tree without its unlikely last nodes: those that reach `threshold` in no row.

    What is left is the best tree of that many nodes, for nodes come in the order of their scores,
    read as log-probabilities. One draft stays. This reads a value back to the host.
    """
    kept = max(2, int((tree.scores >= math.log(threshold)).sum(1).amax()))
    if kept >= tree.tokens.shape[1]:
        return tree
    parts = {field.name: getattr(tree, field.name)[:, :kept] for field in fields(tree)}
    parts["words"] = parts["words"][:, :, : -(-kept // 64)]
    return Tree(**parts)


def chain_tree(anchor: Tensor, ids: Tensor) -> Tree:
    """Build the tree that is one path: node i is the i-th token after the anchor.

    anchor: [B] int64.
    ids:    [B, L] int64, one token per depth.

    Every node is valid and has rank 0 and score 0, whatever the drafter thought of it. All but
    the tokens are constants, shared by every chain of this length: not to be written to.
    """
    batch, depth = ids.shape
    parents, depths, words, ranks, scores, valid = _chain(depth + 1, ids.device)
    return Tree(
        tokens=torch.cat([anchor.unsqueeze(1), ids], 1),
        parents=parents.expand(batch, -1),
        depths=depths.expand(batch, -1),
        ranks=ranks.expand(batch, -1),
        scores=scores.expand(batch, -1),
        valid=valid.expand(batch, -1),
        words=words.expand(batch, -1, -1),
    )


def _ancestor_words(parents: Tensor, deepest: int) -> Tensor:
    """Ancestor-or-self bit words `[B, N, W]` of parents `[B, N]`, by pointer doubling."""
    own = self_words(parents.shape[1], parents.device)
    words = own.expand(parents.shape[0], *own.shape)
    above, reach = parents.unsqueeze(2), 1
    while True:
        # words covers `reach` nodes from each node upwards, and above is the node after those.
        words = words | words.gather(1, above.expand_as(words))
        reach *= 2
        if reach > deepest:
            return words
        above = above.gather(1, above)


# The caches below never forget: a captured CUDA graph reads these tensors at every replay.


@cache
def self_words(num_nodes: int, device: torch.device) -> Tensor:
    """Bit words `[N, W]` int64 that hold each node's own bit. Shared: not to be written to."""
    words = torch.zeros(num_nodes, -(-num_nodes // 64), dtype=torch.int64, device=device)
    node = torch.arange(num_nodes, device=device)
    words[node, node // 64] = torch.ones_like(node) << node % 64
    return words


@cache
def _chain(num_nodes: int, device: torch.device) -> tuple[Tensor, ...]:
    depths = torch.arange(num_nodes, device=device)
    own = self_words(num_nodes, device)
    # Bits are distinct, so adding them up is joining them.
    parents, words = (depths - 1).clamp_(min=0), own.cumsum(0)
    scores = torch.zeros(num_nodes, device=device)
    return parents, depths, words, torch.zeros_like(depths), scores, scores == 0


@dataclass
class _Step:
    """How one depth's prefixes come from the list of the depth above."""

    parent_costs: Tensor  # [pairs] int64, place of each pair's parent cost in the list above
    kept: int  # how many of the best pairs are listed
    unsorted: bool  # False when all pairs have the same parent: then they come sorted


@dataclass
class _Plan:
    """What a shape (L, K, N) alone decides.

    A pair (i, j) of a depth is the prefix of candidate j below the i-th best prefix of the depth
    above. All pairs of all depths are numbered from 1, by depth, then i, then j; 0 is the root.
    """

    num_pairs: int
    candidates: Tensor  # [num_pairs] int64, index into the [L * K] candidates
    keys: Tensor  # [1 + num_pairs + padding] int64, keys whose costs are to be filled in
    key_blocks: list[int]  # how keys divide: root and depth 1, depth 2, ..., padding
    cost_blocks: list[int]  # how the pairs divide: depth 1, depth 2, ...
    steps: list[_Step]  # from depth 2 on
    padding: int  # filler keys, where there are fewer prefixes than nodes
    num_listed: int
    table: Tensor  # [4, 1 + num_pairs] int64: token source, parent in the lists, depth, rank
    order: Tensor  # [N] int64, 0, 1, ...
    deepest: int


@cache
def _plan(depth: int, width: int, num_nodes: int, device: torch.device) -> _Plan:
    assert depth >= 1 and width >= 1 and num_nodes >= 1
    budget = num_nodes - 1
    steps: list[_Step] = []
    sizes: list[int] = []
    rows = [(0, 0, 0, 0)]
    kept, start = 1, 0  # the list of the depth above, and where it starts in all lists together
    for d in range(1, depth + 1):
        pairs = _useful_pairs(d, kept, width, budget)
        if not pairs:
            break
        rows += [(1 + (d - 1) * width + j, start + i, d, j) for i, j in pairs]
        sizes.append(len(pairs))
        start += kept
        # A prefix with this many others of its depth before it, and its ancestors, is too late.
        kept = min(len(pairs), budget - d + 1)
        if d > 1:
            places = [2 * (i + (d == 2)) + _COST_HALF for i, _ in pairs]
            steps.append(_Step(torch.tensor(places, device=device), kept, pairs[-1][0] > 0))
    num_listed = start + kept
    padding = max(0, num_nodes - num_listed)
    table = torch.tensor(rows, device=device).T.contiguous()
    numbers = torch.arange(len(rows), device=device)
    fillers = torch.full((padding,), _INFINITE_COST, device=device)
    return _Plan(
        num_pairs=len(rows) - 1,
        candidates=table[0, 1:] - 1,
        keys=torch.cat([numbers, fillers]),
        key_blocks=[1 + sum(sizes[:1]), *sizes[1:], *([padding] if padding else [])],
        cost_blocks=sizes,
        steps=steps,
        padding=padding,
        num_listed=num_listed + padding,
        table=table,
        order=torch.arange(num_nodes, device=device),
        deepest=len(sizes),
    )


def _useful_pairs(depth: int, kept: int, width: int, budget: int) -> list[tuple[int, int]]:
    """The pairs (i, j) of a depth that can be among the `budget` best prefixes, in order.

    Before the pair (i, j) come all others (i', j') with i' <= i and j' <= j, the i + 1 parents
    of those, and one prefix at least for each depth above: (i + 1)(j + 2) + depth - 2 in all, with
    the pair itself. (This sharpens (i + 1)(j + 1) <= budget.)
    """
    if depth == 1:
        return [(0, j) for j in range(min(width, budget))]
    last = budget - depth + 2
    return [(i, j) for i in range(kept) for j in range(min(width, last // (i + 1) - 1))]
