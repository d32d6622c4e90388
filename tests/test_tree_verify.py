"""The vectorised accept against the walk from node to child."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddtree.tree import Tree, accept, build, build_tree, chain_tree, reference
from ddtree.tree.verify import accept_chain


@pytest.fixture(autouse=True)
def forget_plans():
    yield
    build._plan.cache_clear()


def make_tree(batch, depth, width, num_nodes, seed, per_row=False):
    """A random tree; all depths share K tokens, so equal tokens abound among nodes."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(batch, depth, width, generator=generator).argsort(-1)
    weights = torch.log_softmax(torch.randn(batch, depth, width, generator=generator), -1)
    weights = weights.sort(-1, descending=True)[0]
    anchor = torch.randint(width, (batch,), generator=generator)
    budget = torch.randint(num_nodes, (batch,), generator=generator) if per_row else None
    return build_tree(anchor, ids, weights, num_nodes, budget)


def choose_children(tree, seed, probability):
    """Chosen tokens: a random child's where there is one, with this probability, else any."""
    generator = torch.Generator().manual_seed(seed)
    batch, num_nodes = tree.tokens.shape
    chosen = torch.randint(int(tree.tokens.max()) + 2, (batch, num_nodes), generator=generator)
    for row in range(batch):
        for node in range(num_nodes):
            below = (tree.parents[row] == node) & tree.valid[row]
            children = [c for c in below.nonzero().flatten().tolist() if c > 0]
            lucky = float(torch.rand((), generator=generator)) < probability
            if children and lucky:
                pick = int(torch.randint(len(children), (), generator=generator))
                chosen[row, node] = tree.tokens[row, children[pick]]
    return chosen


def as_reference(tree, row):
    return reference.ReferenceTree(
        tree.tokens[row].tolist(),
        tree.parents[row].tolist(),
        tree.depths[row].tolist(),
        tree.ranks[row].tolist(),
        tree.scores[row].tolist(),
        tree.valid[row].tolist(),
        tree.words[row].tolist(),
    )


def assert_equals_walk(tree, chosen, max_depth):
    path = accept(tree, chosen, max_depth)
    assert path.nodes.dtype == path.count.dtype == torch.int64
    assert path.nodes.shape == (len(chosen), max_depth + 1)
    for row in range(len(chosen)):
        expected = reference.walk(as_reference(tree, row), chosen[row].tolist())
        padding = [0] * (max_depth + 1 - len(expected))
        assert path.nodes[row].tolist() == expected + padding
        assert path.count[row] == len(expected)
    return path


@settings(deadline=None, max_examples=150)
@given(
    batch=st.integers(1, 3),
    depth=st.integers(1, 15),
    width=st.integers(1, 8),
    budget=st.integers(0, 140),
    seed=st.integers(0, 2**32),
    probability=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    per_row=st.booleans(),
)
def test_equals_the_walk(batch, depth, width, budget, seed, probability, per_row):
    tree = make_tree(batch, depth, width, budget + 1, seed, per_row)
    assert_equals_walk(tree, choose_children(tree, seed, probability), depth)


@pytest.mark.slow
@settings(deadline=None, max_examples=600)
@given(
    batch=st.integers(1, 4),
    depth=st.integers(1, 15),
    width=st.integers(1, 30),
    budget=st.integers(0, 512),
    seed=st.integers(0, 2**32),
    probability=st.sampled_from([0.5, 0.9, 1.0]),
    per_row=st.booleans(),
)
def test_equals_the_walk_at_length(batch, depth, width, budget, seed, probability, per_row):
    tree = make_tree(batch, depth, width, budget + 1, seed, per_row)
    assert_equals_walk(tree, choose_children(tree, seed, probability), depth)


@pytest.mark.parametrize("num_nodes", [17, 63, 64, 65, 128, 129, 256])
def test_every_node_can_be_the_end(num_nodes):
    """The target leads to each node in turn and then leaves the tree, so siblings are accepted."""
    tree = make_tree(1, 6, 5, num_nodes, seed=num_nodes)
    ends = num_nodes
    many = Tree(*(value.repeat_interleave(ends, 0) for value in vars(tree).values()))
    chosen = torch.full((ends, num_nodes), 99)
    for end in range(ends):
        node = end
        while node:
            parent = int(tree.parents[0, node])
            chosen[end, parent] = tree.tokens[0, node]
            node = parent
    path = assert_equals_walk(many, chosen, 6)
    last = path.nodes.gather(1, path.count.unsqueeze(1) - 1).flatten()
    assert last.tolist() == list(range(ends))
    assert path.count.tolist() == (tree.depths[0] + 1).tolist()
    assert (many.ranks.gather(1, path.nodes) > 0).any()


def test_a_match_below_a_mismatch_does_not_count():
    tree = chain_tree(torch.tensor([1]), torch.tensor([[2, 3, 4]]))
    path = accept(tree, torch.tensor([[2, 9, 4, 7]]), 3)
    assert path.nodes.tolist() == [[0, 1, 0, 0]] and path.count.tolist() == [2]


def test_chain_is_accepted_whole_or_in_part():
    tree = chain_tree(torch.tensor([1, 1, 1]), torch.tensor([[2, 0, 4]] * 3))
    chosen = torch.tensor([[2, 0, 4, 7], [2, 0, 5, 4], [0, 0, 4, 7]])
    path = assert_equals_walk(tree, chosen, 3)
    assert path.count.tolist() == [4, 3, 1]
    assert path.nodes.tolist() == [[0, 1, 2, 3], [0, 1, 2, 0], [0, 0, 0, 0]]


@settings(deadline=None, max_examples=50)
@given(depth=st.integers(0, 15), seed=st.integers(0, 2**32))
def test_chain_needs_no_words(depth, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, (4, depth), generator=generator)
    tree = chain_tree(torch.zeros(4, dtype=torch.int64), ids)
    chosen = choose_children(tree, seed, 0.8)
    path, expected = accept_chain(tree, chosen, depth), accept(tree, chosen, depth)
    assert torch.equal(path.count, expected.count) and path.nodes.shape == expected.nodes.shape
    on_path = torch.arange(depth + 1) < path.count.unsqueeze(1)
    assert torch.equal(path.nodes * on_path, expected.nodes)


def test_root_alone():
    tree = make_tree(2, 4, 3, 1, seed=0)
    path = accept(tree, tree.tokens.clone(), 4)
    assert path.nodes.tolist() == [[0] * 5] * 2 and path.count.tolist() == [1, 1]


@pytest.mark.parametrize("cut", [False, True])
def test_filler_is_never_accepted(cut):
    """Filler nodes carry the anchor token below the root: a target that repeats it must not match.

    Here they come from a row budget, or from a tree with fewer prefixes than nodes.
    """
    anchor, num_nodes = torch.tensor([5, 0]), 12
    ids = torch.tensor([[[1, 2]], [[1, 2]]])
    weights = torch.full((2, 1, 2), -1.0)
    budget = torch.tensor([1, 0]) if cut else None
    tree = build_tree(anchor, ids, weights, num_nodes, budget)
    assert not tree.valid.all()
    chosen = anchor.unsqueeze(1).repeat(1, num_nodes)
    path = assert_equals_walk(tree, chosen, 1)
    assert path.count.tolist() == [1, 1] and path.nodes.tolist() == [[0, 0], [0, 0]]


def test_a_cut_row_does_not_accept_what_the_whole_tree_would():
    ids = torch.arange(3).repeat(1, 4, 1)
    weights = torch.tensor([-0.1, -4.0, -5.0]).repeat(1, 4, 1)
    chosen = torch.zeros(1, 20, dtype=torch.int64)
    whole = build_tree(torch.tensor([2]), ids, weights, 20)
    assert accept(whole, chosen, 4).count.tolist() == [5]
    cut = build_tree(torch.tensor([2]), ids, weights, 20, torch.tensor([2]))
    assert accept(cut, chosen, 4).nodes.tolist() == [[0, 1, 2, 0, 0]]


def test_tree_is_left_as_it_was():
    tree = make_tree(2, 5, 4, 30, seed=1)
    before = [value.clone() for value in vars(tree).values()]
    chosen = choose_children(tree, 2, 0.9)
    chosen_before = chosen.clone()
    accept(tree, chosen, 5)
    assert torch.equal(chosen, chosen_before)
    for value, old in zip(vars(tree).values(), before, strict=True):
        assert torch.equal(value, old)


def test_runs_without_data():
    tree = make_tree(2, 5, 4, 70, seed=1)
    ghost = Tree(*(value.to("meta") for value in vars(tree).values()))
    path = accept(ghost, torch.zeros(2, 70, dtype=torch.int64, device="meta"), 5)
    assert path.nodes.shape == (2, 6) and path.count.shape == (2,)
    assert path.nodes.device.type == path.count.device.type == "meta"
