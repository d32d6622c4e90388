"""Finds the path of a draft tree that the target agrees with, without a walk."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.tree.build import Tree, self_words


@dataclass
class Path:
    """Accepted paths of B rows.

    nodes: [B, L + 1] int64, node index at each depth, the root first; 0 after the path's end.
    count: [B] int64, D, the path's length including the root.
    """

    nodes: Tensor
    count: Tensor


def accept(tree: Tree, chosen: Tensor, max_depth: int) -> Path:
    """Accept every node whose path below the root carries its parents' chosen tokens.

    chosen:    [B, N] int64, the target's token after each node.
    max_depth: L, at least the depth of the deepest node.

    Siblings have distinct tokens, so the accepted nodes are one path. The token chosen at its last
    node, `chosen[nodes[count - 1]]`, is the bonus. Filler nodes are never accepted.
    """
    batch, num_nodes = chosen.shape
    wrong = tree.tokens.ne(chosen.gather(1, tree.parents)) | ~tree.valid
    wrong[:, 0].fill_(False)
    own = self_words(num_nodes, chosen.device)
    # Bits are distinct, so adding them up is joining them.
    wrong_words = (wrong.unsqueeze(2) * own).sum(1, keepdim=True)
    accepted = (tree.words & wrong_words).any(2).logical_not_()
    order = torch.arange(num_nodes, device=chosen.device)
    nodes = chosen.new_zeros(batch, max_depth + 1)
    nodes.scatter_add_(1, tree.depths, order * accepted)
    return Path(nodes=nodes, count=accepted.sum(1))


def accept_chain(tree: Tree, chosen: Tensor, max_depth: int) -> Path:
    """As `accept`, for a chain (node i at depth i, N = L + 1): by a running product, no words.

    All nodes are taken as valid, and `nodes` is not zeroed after the path's end: it goes on along
    the chain.
    """
    batch, num_nodes = chosen.shape
    assert num_nodes == max_depth + 1
    if max_depth == 0:
        return Path(nodes=tree.parents, count=tree.parents[:, 0] + 1)
    right = tree.tokens[:, 1:].eq(chosen[:, :-1])
    nodes = torch.arange(num_nodes, device=chosen.device).expand(batch, num_nodes)
    return Path(nodes=nodes, count=1 + right.cumprod(1).sum(1))
