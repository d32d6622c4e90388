"""The tree-build kernel: one program per request grows the tree node by node."""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.kernels.checks import describe, power_of_two
from ddtree.kernels.lazy import Arg, constexpr, kernel, tl

MAX_NODES, MAX_DEPTH, MAX_CANDIDATES = 512, 255, 16384
"""What the fields of a key can hold: 10 bits for a node, 8 for a depth, 14 for a rank."""

# A key is one int64 that says everything about a node that is not in the tree yet: the bits of its
# float32 cost (= -score >= 0, whose bits sort like the number), its depth, its parent and its rank.
# The smallest key is the next node, ties included, and no two are equal.


@kernel
def _cost(weights: Arg, index: Arg, inside: Arg) -> Arg:
    """The cleaned cost of a candidate: NaN is infinite, a positive weight and -0 are free."""
    weight = tl.load(weights + index, mask=inside, other=float("-inf"))
    # 0 - w rather than -w: it turns both zeros into +0. NaN fails both comparisons.
    return tl.where(weight >= 0.0, 0.0, tl.where(weight < 0.0, 0.0 - weight, float("inf")))


@kernel
def _key(cost: Arg, low: Arg) -> Arg:
    return (cost.to(tl.int32, bitcast=True).to(tl.int64) << 32) + low


@kernel
def _tree_build(
    anchor: Arg,
    ids: Arg,
    weights: Arg,
    budget: Arg,
    tokens: Arg,
    parents: Arg,
    depths: Arg,
    ranks: Arg,
    scores: Arg,
    valid: Arg,
    words: Arg,
    depth: Arg,
    width: Arg,
    num_nodes: Arg,
    num_words: Arg,
    HAS_BUDGET: constexpr,
    NODES: constexpr,
    WORDS: constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    ids += row * depth * width
    weights += row * depth * width
    words += row * num_nodes * num_words
    node = tl.arange(0, NODES)
    word = tl.arange(0, WORDS)
    in_words = word < num_words
    never = tl.full([NODES], 0x7F800000 << 32, tl.int64)
    limit = num_nodes
    if HAS_BUDGET:
        limit = tl.minimum(tl.load(budget + row).to(tl.int32) + 1, num_nodes)

    # Slot p holds the next unexpanded child of node p; the root's first child to begin with.
    costs = tl.zeros([NODES], tl.float32)
    first = _cost(weights, 0, (depth > 0) & (width > 0))
    slots = tl.where(node == 0, _key(first + costs, 1 << 24), never)
    best = never
    tl.store(words + word, (word == 0).to(tl.int64), mask=in_words)
    for i in range(1, limit):
        key = tl.min(slots, 0)
        found = key < (0x7F800000 << 32)
        d = ((key >> 24) & 0xFF).to(tl.int32)
        p = tl.where(found, (key >> 14) & 0x3FF, 0).to(tl.int32)
        r = (key & 0x3FFF).to(tl.int32)
        # Where nothing is found all slots are infinite, and what is added below stays so.
        brother = _cost(weights, (d - 1) * width + r + 1, found & (r + 1 < width))
        child = _cost(weights, d * width, found & (d < depth))
        cost = (key >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        new = node == i
        best = tl.where(new, key, best)
        slots = tl.where(node == p, _key(costs + brother, (key & 0xFFFFFFFF) + 1), slots)
        costs = tl.where(new, cost, costs)
        slots = tl.where(new, _key(costs + child, ((d + 1) << 24) + (i << 14)), slots)
        # The row above may be another thread's store of the last pass.
        tl.debug_barrier()
        above = tl.load(words + p * num_words + word, mask=in_words, other=0)
        own = tl.where(word == i // 64, tl.full([WORDS], 1, tl.int64) << (i % 64), 0)
        tl.store(words + i * num_words + word, above | own, mask=in_words)
    for i in range(limit, num_nodes):
        own = tl.where(word == i // 64, tl.full([WORDS], 1, tl.int64) << (i % 64), 0)
        tl.store(words + i * num_words + word, own | (word == 0).to(tl.int64), mask=in_words)

    best = tl.where(node == 0, 0, best)
    found = best < never
    d = tl.where(found, (best >> 24) & 0xFF, 0)
    r = tl.where(found, best & 0x3FFF, 0)
    token = tl.load(anchor + row) + tl.zeros([NODES], tl.int64)
    token = tl.load(ids + (d - 1) * width + r, mask=found & (node > 0), other=0) + tl.where(
        found & (node > 0), 0, token
    )
    score = 0.0 - (best >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    inside = node < num_nodes
    out = row * num_nodes + node
    tl.store(tokens + out, token, mask=inside)
    tl.store(parents + out, tl.where(found, (best >> 14) & 0x3FF, 0), mask=inside)
    tl.store(depths + out, d, mask=inside)
    tl.store(ranks + out, r, mask=inside)
    tl.store(scores + out, score, mask=inside)
    tl.store(valid + out, found, mask=inside)


TreeTensors = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""The fields of `ddtree.tree.Tree`, in its order."""


def build_tree(
    anchor: Tensor, ids: Tensor, weights: Tensor, num_nodes: int, budget: Tensor | None = None
) -> TreeTensors:
    """Build the tree of the `num_nodes - 1` best prefixes below the anchor, for every row.

    The tree is `ddtree.tree.build_tree`'s, bit for bit; here it is grown as the heap grows it.

    anchor:    [B] int64.
    ids:       [B, L, K] int64, contiguous: candidate tokens per depth.
    weights:   [B, L, K] float32, contiguous: each depth's are non-increasing once cleaned.
    num_nodes: N, up to 512, nodes including the root.
    budget:    [B] int64 from 0 to N - 1, nodes below the root that a row may use; None: all.

    Returns tokens, parents, depths, ranks [B, N] int64, scores [B, N] float32, valid [B, N] bool
    and words [B, N, ceil(N / 64)] int64.

    Raises:
        ValueError: a tensor has another shape, dtype or layout, or a size is out of range.
    """
    if ids.dim() != 3 or anchor.shape != ids.shape[:1]:
        raise ValueError(
            f"ids: expected [B, L, K] for {tuple(anchor.shape)} anchors, got {describe(ids)}"
        )
    batch, depth, width = ids.shape
    if weights.shape != ids.shape or weights.dtype != torch.float32:
        raise ValueError(f"weights: expected {tuple(ids.shape)} float32, got {describe(weights)}")
    if budget is not None and budget.shape != (batch,):
        raise ValueError(f"budget: expected ({batch},), got {describe(budget)}")
    integers = {"anchor": anchor, "ids": ids} | ({} if budget is None else {"budget": budget})
    for name, tensor in integers.items():
        if tensor.dtype != torch.int64:
            raise ValueError(f"{name}: expected int64, got {describe(tensor)}")
    for name, tensor in {**integers, "weights": weights}.items():
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got {describe(tensor)}")
    limits = {"num_nodes": (num_nodes, 1, MAX_NODES), "ids: L": (depth, 0, MAX_DEPTH)}
    for name, (size, least, most) in (limits | {"ids: K": (width, 1, MAX_CANDIDATES)}).items():
        if not least <= size <= most:
            raise ValueError(f"{name}: expected {least} to {most}, got {size}")
    return _tree_build_op(anchor, ids, weights, num_nodes, budget)


@torch.library.custom_op("ddtree::tree_build", mutates_args=())
def _tree_build_op(
    anchor: Tensor, ids: Tensor, weights: Tensor, num_nodes: int, budget: Tensor | None
) -> TreeTensors:
    batch, depth, width = ids.shape
    tree = _empty_tree(ids, num_nodes)
    _tree_build[(batch,)](
        anchor,
        ids,
        weights,
        anchor if budget is None else budget,
        *tree,
        depth,
        width,
        num_nodes,
        tree[-1].shape[2],
        HAS_BUDGET=budget is not None,
        NODES=power_of_two(num_nodes),
        WORDS=power_of_two(tree[-1].shape[2]),
        # One warp: what a node waits for is the minimum, and within a warp it needs no barrier.
        num_warps=1,
    )
    return tree


@_tree_build_op.register_fake
def _(
    anchor: Tensor, ids: Tensor, weights: Tensor, num_nodes: int, budget: Tensor | None
) -> TreeTensors:
    return _empty_tree(ids, num_nodes)


def _empty_tree(ids: Tensor, num_nodes: int) -> TreeTensors:
    batch = ids.shape[0]
    tokens, parents, depths, ranks = (ids.new_empty(batch, num_nodes) for _ in range(4))
    scores = ids.new_empty(batch, num_nodes, dtype=torch.float32)
    words = ids.new_empty(batch, num_nodes, -(-num_nodes // 64))
    return tokens, parents, depths, ranks, scores, torch.empty_like(scores, dtype=torch.bool), words
