"""The tree and the walk as one would write them on paper: the oracle of the vectorised ones."""

import ctypes
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class ReferenceTree:
    """One row's tree: the fields of `ddtree.tree.Tree` as lists, without the batch dimension."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    valid: list[bool] = field(default_factory=list)
    words: list[list[int]] = field(default_factory=list)


def build_tree(
    anchor: int,
    ids: Sequence[Sequence[int]],
    weights: Sequence[Sequence[float]],
    num_nodes: int,
    budget: int | None = None,
) -> ReferenceTree:
    """Build one row's tree with a best-first heap.

    ids, weights: L lists of K candidates, each depth's weights non-increasing once cleaned.
    num_nodes:    N, nodes including the root; those that are not needed are filler.
    budget:       nodes below the root that may be used; None: N - 1.

    Source: the best-first construction of "Accelerating Speculative Decoding with Block Diffusion
    Draft Trees" (arXiv 2604.12989), with float32 sums, and ties broken by depth, then the parent's
    order, then rank.
    """
    budget = num_nodes - 1 if budget is None else budget
    cleaned = [[_clean(w) for w in depth] for depth in weights]
    tree = ReferenceTree()
    num_words = -(-num_nodes // 64)

    def add(token: int, parent: int, depth: int, rank: int, score: float, valid: bool) -> int:
        node = len(tree.tokens)
        path = 1 << node
        path |= _joined(tree.words[parent]) if node else 0
        tree.tokens.append(token)
        tree.parents.append(parent)
        tree.depths.append(depth)
        tree.ranks.append(rank)
        tree.scores.append(score)
        tree.valid.append(valid)
        tree.words.append(_split(path, num_words))
        return node

    # Entries sort as nodes do: (-score, depth, parent, rank). A popped node brings in its best
    # child and its next sibling, neither of which can come before it.
    heap: list[tuple[float, int, int, int]] = []

    def push(parent: int, rank: int) -> None:
        depth = tree.depths[parent] + 1
        if depth > len(ids) or rank >= len(ids[depth - 1]):
            return
        score = _float32_sum(tree.scores[parent], cleaned[depth - 1][rank])
        if score > -math.inf:
            heapq.heappush(heap, (-score, depth, parent, rank))

    push(add(anchor, 0, 0, 0, 0.0, True), 0)
    while heap and len(tree.tokens) <= budget:
        negative_score, depth, parent, rank = heapq.heappop(heap)
        score = 0.0 - negative_score
        push(add(ids[depth - 1][rank], parent, depth, rank, score, True), 0)
        push(parent, rank + 1)
    while len(tree.tokens) < num_nodes:
        add(anchor, 0, 0, 0, -math.inf, False)
    return tree


def walk(tree: ReferenceTree, chosen: Sequence[int]) -> list[int]:
    """Follow the chosen token from node to child, starting at the root; the nodes visited.

    chosen: the target's token after each node.
    """
    path = [0]
    while True:
        for node in range(1, len(tree.tokens)):
            follows = tree.parents[node] == path[-1] and tree.tokens[node] == chosen[path[-1]]
            if follows and tree.valid[node]:
                path.append(node)
                break
        else:
            return path


def _clean(weight: float) -> float:
    return -math.inf if math.isnan(weight) else 0.0 if weight >= 0.0 else weight


def _float32_sum(a: float, b: float) -> float:
    # The double sum of two float32 numbers, rounded once more, is the correctly rounded float32.
    return ctypes.c_float(a + b).value


def _joined(words: Sequence[int]) -> int:
    return sum((word % 2**64) << 64 * i for i, word in enumerate(words))


def _split(bits: int, num_words: int) -> list[int]:
    words = [bits >> 64 * i & (2**64 - 1) for i in range(num_words)]
    return [word - 2**64 if word >= 2**63 else word for word in words]
