"""The tree-build kernel: bit for bit the heap and the torch builder."""

import pytest
import torch
from kernel_tools import interpreted
from test_tree_build import FAMILIES, assert_equals_heap, assert_well_formed, make_inputs

from ddtree.kernels import tree_build
from ddtree.tree import Tree
from ddtree.tree import build_tree as torch_build_tree


def check(family, batch, depth, width, num_nodes, seed, per_row=False):
    anchor, ids, weights = make_inputs(family, batch, depth, width, seed)
    budget = None
    if per_row:
        generator = torch.Generator().manual_seed(seed + 1)
        budget = torch.randint(num_nodes, (batch,), generator=generator)
        budget[0], budget[-1] = 0, num_nodes - 1
    tree = Tree(*tree_build.build_tree(anchor, ids, weights, num_nodes, budget))
    assert_equals_heap(tree, anchor, ids, weights, budget)
    assert_well_formed(tree, anchor, ids, weights)
    expected = torch_build_tree(anchor, ids, weights, num_nodes, budget)
    for field, value in vars(expected).items():
        found = getattr(tree, field)
        assert found.dtype == value.dtype and torch.equal(found, value), field


@pytest.mark.parametrize("family", FAMILIES)
@interpreted
def test_equals_the_heap_and_the_torch_builder(family):
    check(family, batch=3, depth=5, width=5, num_nodes=24, seed=1, per_row=True)


SHAPES = [(1, 1, 1), (1, 1, 2), (1, 4, 9), (5, 1, 9), (2, 2, 16), (3, 8, 65)]
LARGER = [(3, 3, 63), (3, 8, 64), (15, 20, 128), (6, 7, 129)]
SIZES = [*SHAPES, *(pytest.param(s, marks=pytest.mark.slow) for s in LARGER)]


@pytest.mark.parametrize("shape", SIZES, ids=str)
@interpreted
def test_sizes_around_words_and_with_too_few_candidates(shape):
    depth, width, num_nodes = shape
    families = ("random", "flat", "mixed") if num_nodes < 60 else ("integers",)
    for seed, family in enumerate(families):
        check(family, 1, depth, width, num_nodes, seed)


@pytest.mark.parametrize("family", ["random", "flat", "integers", "mixed"])
@pytest.mark.slow
@interpreted
def test_the_largest_budget(family):
    check(family, batch=2, depth=15, width=511, num_nodes=512, seed=3, per_row=True)
    check(family, batch=1, depth=15, width=200, num_nodes=257, seed=4)


@interpreted
def test_no_candidates_at_all():
    ids, anchor = torch.zeros(2, 0, 3, dtype=torch.int64), torch.tensor([5, 6])
    tree = tree_build.build_tree(anchor, ids, torch.zeros(2, 0, 3), 3)
    assert tree[0].tolist() == [[5] * 3, [6] * 3]
    assert tree[5].tolist() == [[True, False, False]] * 2
    assert tree[6].flatten(1).tolist() == [[1, 3, 5]] * 2


@interpreted
def test_weights_out_of_order_still_give_the_heap_s_tree():
    anchor, ids, weights = make_inputs("random", 2, 4, 6, 5)
    weights = weights.flip(2)
    tree = Tree(*tree_build.build_tree(anchor, ids, weights, 30))
    assert_equals_heap(tree, anchor, ids, weights)


def test_shapes_without_running():
    anchor, ids, weights = (x.to("meta") for x in make_inputs("random", 2, 4, 6, 5))
    tree = tree_build.build_tree(anchor, ids, weights, 70, anchor)
    expected = torch_build_tree(*make_inputs("random", 2, 4, 6, 5), 70)
    for found, value in zip(tree, vars(expected).values(), strict=True):
        assert found.shape == value.shape and found.dtype == value.dtype and found.is_meta


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"anchor": torch.zeros(3, dtype=torch.int64)}, "ids"),
        ({"anchor": torch.zeros(2, dtype=torch.int32)}, "anchor"),
        ({"ids": torch.zeros(2, 4, 6, dtype=torch.int32)}, "ids"),
        ({"ids": torch.zeros(2, 6, 4, dtype=torch.int64).mT}, "ids"),
        ({"weights": torch.zeros(2, 4, 6, dtype=torch.float64)}, "weights"),
        ({"weights": torch.zeros(2, 4, 5)}, "weights"),
        ({"weights": torch.zeros(2, 6, 4).mT}, "weights"),
        ({"budget": torch.zeros(3, dtype=torch.int64)}, "budget"),
        ({"num_nodes": 513}, "num_nodes"),
        ({"num_nodes": 0}, "num_nodes"),
    ],
)
def test_what_it_refuses(change, name):
    inputs = dict(zip(("anchor", "ids", "weights"), make_inputs("random", 2, 4, 6, 5), strict=True))
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        tree_build.build_tree(**(inputs | {"num_nodes": 9} | change))
