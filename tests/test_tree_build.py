"""The builder against the heap, against brute force, and against the tree's own rules."""

import itertools
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from ddtree.tree import Tree, build, build_tree, chain_tree, reference
from ddtree.tree.build import trim_tree

FIELDS = ("tokens", "parents", "depths", "ranks", "valid", "words")
FAMILIES = (
    "random",
    "flat",
    "peaked",
    "one-hot",
    "bf16",
    "integers",
    "minus-inf",
    "nan",
    "nan-depth",
    "minus-zero",
    "positive",
    "tiny",
    "huge",
    "mixed",
)


@pytest.fixture(autouse=True)
def forget_plans():
    """An engine uses a handful of shapes and keeps their plans; these tests use thousands."""
    yield
    build._plan.cache_clear()


def clean(weights):
    weights = torch.where(weights.isnan(), -torch.inf, weights)
    return torch.where(weights >= 0, 0.0, weights)


def sort(weights):
    """Each depth in descending order of what the weights are after cleaning."""
    return weights.gather(-1, clean(weights).argsort(dim=-1, descending=True, stable=True))


def make_weights(family, shape, generator):
    width = shape[-1]

    def normal():
        return torch.randn(shape, generator=generator)

    def coin(probability):
        return torch.rand(shape, generator=generator) < probability

    weights = torch.log_softmax(3 * normal(), -1)
    if family == "flat":
        weights = torch.full(shape, -math.log(width + 1))
    elif family == "peaked":
        weights = torch.where(torch.arange(width) == 0, -1e-3, weights - 12)
    elif family == "one-hot":
        weights = torch.where(torch.arange(width) == 0, 0.0, -torch.inf).expand(shape)
    elif family == "bf16":
        weights = weights.bfloat16().float()
    elif family == "integers":
        weights = weights.round()
    elif family == "minus-inf":
        weights = weights.masked_fill(coin(0.4), -torch.inf)
    elif family == "nan":
        weights = weights.masked_fill(coin(0.4), torch.nan)
    elif family == "nan-depth":
        weights = weights.clone()
        weights[..., -1, :] = torch.nan
    elif family == "minus-zero":
        weights = weights.round().masked_fill(coin(0.4), -0.0)
    elif family == "positive":
        weights = normal()
    elif family == "tiny":
        weights = -normal().abs() * 1e-40
    elif family == "huge":
        weights = -normal().abs() * 1.5e38
    elif family == "mixed":
        specials = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 0.0, -1.0, 1.0])
        picked = torch.randint(len(specials), shape, generator=generator)
        weights = torch.where(coin(0.5), specials[picked], weights.round())
    return sort(weights)


def make_inputs(family, batch, depth, width, seed):
    """Anchors `[B]`, ids `[B, L, K]` with token 0 at every depth, weights `[B, L, K]`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(batch, depth, width, generator=generator).argsort(-1)
    anchor = torch.randint(width, (batch,), generator=generator)
    return anchor, ids, make_weights(family, (batch, depth, width), generator)


def bits(scores):
    return [struct.pack("<f", score) for score in scores]


def assert_equals_heap(tree, anchor, ids, weights, budget=None):
    num_nodes = tree.tokens.shape[1]
    for row in range(len(anchor)):
        limit = None if budget is None else int(budget[row])
        expected = reference.build_tree(
            int(anchor[row]), ids[row].tolist(), weights[row].tolist(), num_nodes, limit
        )
        for field in FIELDS:
            assert getattr(tree, field)[row].tolist() == getattr(expected, field), field
        assert bits(tree.scores[row].tolist()) == bits(expected.scores)


def check(family, batch, depth, width, num_nodes, seed, per_row=False):
    anchor, ids, weights = make_inputs(family, batch, depth, width, seed)
    budget = None
    if per_row:
        generator = torch.Generator().manual_seed(seed + 1)
        budget = torch.randint(num_nodes, (batch,), generator=generator)
    before = ids.clone(), weights.clone()
    tree = build_tree(anchor, ids, weights, num_nodes, budget)
    assert torch.equal(ids, before[0]) and torch.equal(weights.nan_to_num(), before[1].nan_to_num())
    assert_equals_heap(tree, anchor, ids, weights, budget)
    assert_well_formed(tree, anchor, ids, weights)


def assert_well_formed(tree, anchor, ids, weights, ties=True):
    """What holds for any tree, told from the inputs and the fields alone."""
    assert tree.scores.dtype == torch.float32 and tree.valid.dtype == torch.bool
    for row in range(len(anchor)):
        tokens, parents, depths, ranks, valid, words = (
            getattr(tree, field)[row].tolist() for field in FIELDS
        )
        scores = tree.scores[row].tolist()
        num_nodes, count = len(tokens), sum(valid)
        root = (int(anchor[row]), 0, 0, 0)
        assert (tokens[0], parents[0], depths[0], ranks[0]) == root
        assert bits(scores[:1]) == bits([0.0])
        assert valid == [True] * count + [False] * (num_nodes - count)
        for node in range(1, count):
            assert 0 <= parents[node] < node and depths[node] == depths[parents[node]] + 1
        for node in range(count, num_nodes):
            assert (tokens[node], parents[node], depths[node], ranks[node]) == root
            assert scores[node] == -math.inf

        places = tree.depths[row, 1:count] - 1, tree.ranks[row, 1:count]
        assert torch.equal(tree.tokens[row, 1:count], ids[row][places])
        sums = tree.scores[row, parents[1:count]] + clean(weights)[row][places]
        assert torch.equal(tree.scores[row, 1:count], sums) and sums.isfinite().all()

        order = [(-scores[n], depths[n], parents[n], ranks[n]) for n in range(1, count)]
        order = order if ties else [key[0] for key in order]
        assert order == sorted(order)
        siblings = list(zip(parents[1:count], tokens[1:count], strict=True))
        assert len(set(siblings)) == len(siblings)

        paths = []
        for node in range(num_nodes):
            above = paths[parents[node]] if node else 0
            paths.append(above | 1 << node)
        assert [sum((w % 2**64) << 64 * i for i, w in enumerate(held)) for held in words] == paths
        assert tree.words.shape[2] == math.ceil(num_nodes / 64)


def brute_force(weights, limit):
    """The best prefixes as rank tuples with their scores, by sorting all there are."""
    above = [((), torch.tensor(0.0))]
    everything = []
    for depth, row in enumerate(clean(weights)):
        here = [
            (-float(score + row[rank]), place, rank, path, score + row[rank])
            for place, (path, score) in enumerate(above)
            for rank in range(len(row))
        ]
        here.sort(key=lambda entry: entry[:3])
        above = [((*path, rank), score) for _, _, rank, path, score in here]
        everything += [(-float(score), depth, i, path) for i, (path, score) in enumerate(above)]
    everything = sorted(entry for entry in everything if math.isfinite(entry[0]))
    return [(path, negative) for negative, _, _, path in everything[:limit]]


def rank_paths(tree, row):
    paths = [()]
    for node in range(1, int(tree.valid[row].sum())):
        paths.append((*paths[tree.parents[row, node]], int(tree.ranks[row, node])))
    return paths[1:]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_nodes", [2, 3, 5, 9, 17, 33, 64, 65, 128, 200])
def test_equals_the_heap(family, num_nodes):
    for depth, width in [(1, 4), (2, 70), (5, 16), (8, 3), (15, 20)]:
        check(family, 2, depth, width, num_nodes, seed=num_nodes + depth)


@pytest.mark.parametrize("depth", range(1, 16))
def test_equals_the_heap_at_every_depth(depth):
    for seed, (family, width) in enumerate(itertools.product(FAMILIES, [1, 2, 7, 40])):
        check(family, 1, depth, width, 24, seed, per_row=seed % 2 == 0)


@pytest.mark.parametrize("num_nodes", [63, 64, 65, 127, 128, 129, 192, 256, 257, 320, 512, 513])
def test_words_at_their_boundaries(num_nodes):
    for family in ("random", "integers", "one-hot"):
        check(family, 1, 12, 24, num_nodes, seed=num_nodes)


@settings(deadline=None, max_examples=150)
@given(
    family=st.sampled_from(FAMILIES),
    batch=st.integers(1, 3),
    depth=st.integers(1, 15),
    width=st.integers(1, 40),
    budget=st.integers(0, 150),
    seed=st.integers(0, 2**32),
    per_row=st.booleans(),
)
def test_equals_the_heap_on_any_shape(family, batch, depth, width, budget, seed, per_row):
    check(family, batch, depth, width, budget + 1, seed, per_row)


@pytest.mark.slow
@settings(deadline=None, max_examples=1500)
@given(
    family=st.sampled_from(FAMILIES),
    batch=st.integers(1, 4),
    depth=st.integers(1, 15),
    width=st.integers(1, 600),
    budget=st.integers(0, 512),
    seed=st.integers(0, 2**32),
    per_row=st.booleans(),
)
def test_equals_the_heap_on_any_shape_at_length(family, batch, depth, width, budget, seed, per_row):
    check(family, batch, depth, width, budget + 1, seed, per_row)
    build._plan.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1, 9))
def test_equals_the_heap_at_every_budget(first):
    for budget in range(first, 513, 8):
        for seed, family in enumerate(FAMILIES):
            check(family, 1, 1 + budget % 15, [512, 64, 9][budget % 3], budget + 1, seed)
        build._plan.cache_clear()


@settings(deadline=None, max_examples=150)
@given(
    levels=st.lists(
        st.lists(
            st.one_of(
                st.floats(width=32),
                st.sampled_from([0.0, -0.0, -1.0, -2.0, -3.0, math.inf, -math.inf, math.nan]),
            ),
            min_size=4,
            max_size=4,
        ),
        min_size=1,
        max_size=6,
    ),
    budget=st.integers(0, 40),
)
def test_equals_the_heap_on_any_weights(levels, budget):
    weights = sort(torch.tensor([levels]))
    ids = torch.arange(4).flip(0).expand(weights.shape)
    tree = build_tree(torch.tensor([3]), ids, weights, budget + 1)
    assert_equals_heap(tree, torch.tensor([3]), ids, weights)
    assert_well_formed(tree, torch.tensor([3]), ids, weights)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("depth", "width"), [(1, 6), (2, 5), (3, 4), (4, 3), (6, 2), (9, 1)])
def test_is_the_best_of_all_prefixes(family, depth, width):
    for budget in (1, 2, 5, 12, 30, 140):
        anchor, ids, weights = make_inputs(family, 1, depth, width, seed=budget)
        tree = build_tree(anchor, ids, weights, budget + 1)
        expected = brute_force(weights[0], budget)
        assert rank_paths(tree, 0) == [path for path, _ in expected]
        scores = tree.scores[0, 1 : len(expected) + 1].tolist()
        assert scores == [-negative for _, negative in expected]


def test_known_tree():
    """Two depths, worked out by hand; the tie at -3 goes to the shallower node."""
    ids = torch.tensor([[[7, 0, 5], [0, 7, 5]]])
    weights = torch.tensor([[[-1.0, -3.0, -9.0], [-0.5, -2.0, -4.0]]])
    tree = build_tree(torch.tensor([7]), ids, weights, 6)
    assert tree.tokens.tolist() == [[7, 7, 0, 0, 7, 0]]
    assert tree.parents.tolist() == [[0, 0, 1, 0, 1, 3]]
    assert tree.depths.tolist() == [[0, 1, 2, 1, 2, 2]]
    assert tree.ranks.tolist() == [[0, 0, 0, 1, 1, 0]]
    assert tree.scores.tolist() == [[0.0, -1.0, -1.5, -3.0, -3.0, -3.5]]
    assert tree.words.flatten().tolist() == [0b1, 0b11, 0b111, 0b1001, 0b10011, 0b101001]


def test_sums_are_float32_from_the_root_down():
    """In float64, or summed in another order, the second depth's candidates would differ."""
    weights = torch.tensor([[[-16777216.0, -16777217.0], [-1.0, -1.5], [-1.0, -1.0]]])
    ids = torch.arange(2).expand(1, 3, 2)
    tree = build_tree(torch.tensor([0]), ids, weights, 15)
    assert tree.scores[0, 1] == tree.scores[0, 3] == -16777216.0
    assert_equals_heap(tree, torch.tensor([0]), ids, weights)
    paths = brute_force(weights[0], 14)
    assert rank_paths(tree, 0) == [path for path, _ in paths]


def test_more_nodes_than_prefixes():
    anchor, ids, weights = make_inputs("random", 3, 2, 3, seed=0)
    tree = build_tree(anchor, ids, weights, 100)
    assert tree.valid.sum(1).tolist() == [1 + 3 + 9] * 3
    assert_equals_heap(tree, anchor, ids, weights)


def test_root_alone():
    anchor, ids, weights = make_inputs("random", 2, 5, 4, seed=0)
    tree = build_tree(anchor, ids, weights, 1)
    assert tree.tokens.tolist() == anchor.unsqueeze(1).tolist()
    assert tree.words.tolist() == [[[1]]] * 2 and tree.valid.all()
    assert_well_formed(tree, anchor, ids, weights)


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_no_usable_candidate_leaves_the_root(value):
    anchor, ids, weights = make_inputs("random", 2, 5, 4, seed=0)
    tree = build_tree(anchor, ids, torch.full_like(weights, value), 10)
    assert tree.valid.tolist() == [[True] + [False] * 9] * 2
    assert_well_formed(tree, anchor, ids, weights)


def test_rows_do_not_see_each_other():
    anchor, ids, weights = make_inputs("bf16", 5, 6, 12, seed=1)
    weights[3] = torch.nan
    budget = torch.tensor([0, 39, 7, 12, 38])
    together = build_tree(anchor, ids, weights, 40, budget)
    for row in range(5):
        part = slice(row, row + 1)
        alone = build_tree(anchor[part], ids[part], weights[part], 40, budget[part])
        for field in (*FIELDS, "scores"):
            assert torch.equal(getattr(together, field)[part], getattr(alone, field)), field


def test_a_row_budget_cuts_the_tree_short():
    anchor, ids, weights = make_inputs("random", 2, 6, 12, seed=2)
    whole = build_tree(anchor, ids, weights, 30)
    cut = build_tree(anchor, ids, weights, 30, torch.tensor([29, 10]))
    assert cut.valid.sum(1).tolist() == [30, 11]
    for field in (*FIELDS, "scores"):
        assert torch.equal(getattr(cut, field)[0], getattr(whole, field)[0])
        assert torch.equal(getattr(cut, field)[1, :11], getattr(whole, field)[1, :11])
    assert_equals_heap(cut, anchor, ids, weights, torch.tensor([29, 10]))


@settings(deadline=None, max_examples=100)
@given(
    family=st.sampled_from(FAMILIES),
    batch=st.integers(1, 3),
    budget=st.integers(1, 90),
    threshold=st.sampled_from([1e-30, 1e-3, 0.02, 0.07, 0.3, 0.9, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_a_trimmed_tree_is_the_tree_of_so_many_nodes(family, batch, budget, threshold, seed):
    anchor, ids, weights = make_inputs(family, batch, 4, 8, seed)
    tree = build_tree(anchor, ids, weights, budget + 1)
    trimmed = trim_tree(tree, threshold)
    kept = trimmed.tokens.shape[1]
    likely = (tree.scores >= math.log(threshold)).sum(1)
    assert kept == max(2, int(likely.max()))
    smaller = build_tree(anchor, ids, weights, kept)
    for field in (*FIELDS, "scores"):
        assert torch.equal(getattr(trimmed, field), getattr(smaller, field)), field


def test_a_likely_tree_is_not_trimmed():
    tree = build_tree(*make_inputs("flat", 1, 2, 3, 0), 5)
    assert trim_tree(tree, 1e-9) is tree
    assert trim_tree(tree, 1.0).tokens.shape == (1, 2)


@settings(deadline=None, max_examples=100)
@given(depth=st.integers(1, 6), width=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_unsorted_weights_still_make_a_tree(depth, width, seed):
    anchor, ids, weights = make_inputs("mixed", 2, depth, width, seed)
    shuffled = weights[..., torch.randperm(width, generator=torch.Generator().manual_seed(seed))]
    tree = build_tree(anchor, ids, shuffled, 20)
    assert_well_formed(tree, anchor, ids, shuffled, ties=False)


def test_chain():
    anchor, ids = torch.tensor([4, 0]), torch.tensor([[5, 0, 5], [0, 0, 9]])
    tree = chain_tree(anchor, ids)
    assert tree.tokens.tolist() == [[4, 5, 0, 5], [0, 0, 0, 9]]
    assert tree.parents.tolist() == [[0, 0, 1, 2]] * 2
    assert tree.depths.tolist() == [[0, 1, 2, 3]] * 2
    assert tree.ranks.tolist() == [[0] * 4] * 2 and tree.scores.tolist() == [[0.0] * 4] * 2
    assert tree.valid.all()
    assert tree.words.tolist() == [[[0b1], [0b11], [0b111], [0b1111]]] * 2
    reference_like = build_tree(anchor, ids.unsqueeze(2), torch.full((2, 3, 1), -1.0), 4)
    for field in FIELDS:
        ours, other = getattr(tree, field), getattr(reference_like, field)
        assert torch.equal(ours, other) and ours.dtype == other.dtype, field
    assert tree.scores.dtype == torch.float32


def test_long_chain_has_whole_words():
    words = chain_tree(torch.tensor([0]), torch.zeros(1, 129, dtype=torch.int64)).words
    assert words.shape == (1, 130, 3)
    assert words[0, 63].tolist() == [-1, 0, 0]
    assert words[0, 64].tolist() == [-1, 1, 0]
    assert words[0, 127].tolist() == [-1, -1, 0]
    assert words[0, 129].tolist() == [-1, -1, 3]


def test_trees_own_their_tensors():
    """Constants are shared between calls: writing to a tree must not reach them."""
    anchor, ids, weights = make_inputs("random", 1, 4, 6, seed=3)
    for make in (
        lambda: build_tree(anchor, ids, weights, 20),
        lambda: build_tree(anchor, ids, weights, 1),
    ):
        tree = make()
        kept = {name: value.clone() for name, value in vars(tree).items()}
        for value in vars(tree).values():
            value.fill_(1)
        for name, value in vars(make()).items():
            assert torch.equal(value, kept[name]), name


@pytest.mark.parametrize("num_nodes", [1, 2, 17, 64, 65, 200])
@pytest.mark.parametrize("per_row", [False, True])
def test_runs_without_data(num_nodes, per_row):
    """On the meta device anything that would ask the host for a value raises."""
    anchor, ids, weights = make_inputs("random", 2, 5, 8, seed=0)
    budget = torch.tensor([0, num_nodes - 1]) if per_row else None
    expected = build_tree(anchor, ids, weights, num_nodes, budget)
    tree = build_tree(
        anchor.to("meta"),
        ids.to("meta"),
        weights.to("meta"),
        num_nodes,
        None if budget is None else budget.to("meta"),
    )
    chain = chain_tree(anchor.to("meta"), ids[:, :, 0].to("meta"))
    expected_chain = chain_tree(anchor, ids[:, :, 0])
    for ours, real in ((tree, expected), (chain, expected_chain)):
        assert isinstance(ours, Tree)
        for field in (*FIELDS, "scores"):
            value, shape = getattr(ours, field), getattr(real, field)
            assert value.device.type == "meta"
            assert (value.shape, value.dtype) == (shape.shape, shape.dtype), field


class RecordOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func.name())
        return func(*args, **(kwargs or {}))


def test_same_operations_whatever_the_data():
    budget = torch.tensor([3, 20])
    recorded = []
    for family in ("random", "nan", "one-hot"):
        anchor, ids, weights = make_inputs(family, 2, 5, 16, seed=0)
        build_tree(anchor, ids, weights, 32, budget)
        with RecordOps() as record:
            build_tree(anchor, ids, weights, 32, budget)
            chain_tree(anchor, ids[:, :, 0])
        recorded.append(record.ops)
    assert recorded[0] == recorded[1] == recorded[2]
    for op in recorded[0]:
        assert not any(word in op for word in ("lift_fresh", "scalar_dense", "nonzero", "_to_copy"))
