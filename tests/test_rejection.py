"""Recursive rejection emits exactly the target's law, whatever the drafter and the tree."""

import itertools
import math

import pytest
import torch

from ddtree.tree.build import build_tree
from ddtree.tree.rejection import sample_drafts, shape_weights, walk

V, SAMPLES, TOKENS = 8, 24000, 3


def chi_square_passes(counts, law):
    """Whether counts [C] fit the probabilities [C] with p > 0.001 (rare cells are joined)."""
    expected = law * counts.sum()
    rare = expected < 5
    counts = torch.cat((counts[~rare], counts[rare].sum()[None]))
    expected = torch.cat((expected[~rare], expected[rare].sum()[None]))
    if expected[-1] == 0:
        if counts[-1] > 0:
            return False
        counts, expected = counts[:-1], expected[:-1]
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    # Wilson-Hilferty: the quantile that is passed with probability 0.001.
    spread = 2 / (9 * freedom)
    return chi2 < freedom * (1 - spread + 3.09 * math.sqrt(spread)) ** 3


def target_law(generator, filtered):
    """A first-order target: probabilities [V, V] of the token after each."""
    law = (torch.randn(V, V, generator=generator) * 1.5).softmax(-1)
    if filtered:
        law[law < law.sort(-1).values[:, -4:-3]] = 0.0
    return law / law.sum(-1, keepdim=True)


def drafts(kind, law, depths, generator):
    """The drafter's log-probabilities [L, V]: it doesn't know the tokens between."""
    power = law.clone()
    good = []
    for _ in range(depths):
        good.append(power.mean(0))
        power = power @ law
    noise = torch.randn(depths, V, generator=generator)
    exact = torch.stack(good).clamp_min(1e-6).log()
    return {
        "good": exact,
        "noisy": (exact + noise).log_softmax(-1),
        "bad": (-exact).log_softmax(-1),
        "sharp": (8 * noise).log_softmax(-1),
    }[kind]


def emit(law, log_q, budget, ranks, drafted=sample_drafts):
    """The first tokens [SAMPLES, TOKENS] of as many independent requests, all from token 0."""
    depths = len(log_q)
    rows = torch.arange(SAMPLES)
    seeds = rows * 7919 + 11
    out = torch.full((SAMPLES, TOKENS + depths + 1), -1)
    length = torch.zeros(SAMPLES, dtype=torch.int64)
    anchor = torch.zeros(SAMPLES, dtype=torch.int64)
    accepted = 0
    while int(length.min()) < TOKENS:
        live = (length < TOKENS).nonzero()[:, 0]
        q = log_q.expand(len(live), -1, -1)
        ids = drafted(q, seeds[live], length[live], ranks)
        weights = shape_weights(depths, ranks, ids.device).expand(ids.shape).contiguous()
        tree = build_tree(anchor[live], ids, weights, budget + 1)

        def after(nodes, tree=tree):
            return law[tree.tokens.gather(1, nodes[:, None])[:, 0]]

        path, tokens = walk(tree, after, q.exp(), seeds[live], length[live], ranks)
        for depth in range(depths + 1):
            emits = path.count > depth
            out[live[emits], length[live[emits]] + depth] = tokens[emits, depth]
        accepted += int((path.count - 1).sum())
        length[live] += path.count
        anchor[live] = out[live, length[live] - 1]
    return out[:, :TOKENS], accepted


def joint(law):
    """Probabilities [V ** 3] of the first three tokens after token 0."""
    return torch.einsum("a,ab,bc->abc", law[0], law, law).flatten().double()


def fits(tokens, law):
    cells = (tokens[:, 0] * V + tokens[:, 1]) * V + tokens[:, 2]
    return chi_square_passes(torch.bincount(cells, minlength=V**3).double(), joint(law))


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("kind", ["good", "noisy", "bad", "sharp"])
@pytest.mark.parametrize(("budget", "ranks", "depths"), [(3, 1, 3), (7, 3, 2), (12, 8, 4)])
def test_the_law_is_the_targets(kind, filtered, budget, ranks, depths):
    generator = torch.Generator().manual_seed(3)
    law = target_law(generator, filtered)
    log_q = drafts(kind, law, depths, generator)
    tokens, accepted = emit(law, log_q, budget, ranks)
    assert fits(tokens, law)
    assert accepted > (0 if kind == "sharp" else SAMPLES / 20)


@pytest.mark.parametrize("kind", ["good", "noisy"])
def test_a_deterministic_tree_would_be_biased(kind):
    """The test has power: top-k candidates, accepted with min(1, p / q), fail it."""
    generator = torch.Generator().manual_seed(3)
    law = target_law(generator, False)
    log_q = drafts(kind, law, 2, generator)

    def best(log_q, seeds, length, count):
        return log_q.topk(count, -1).indices

    assert not fits(emit(law, log_q, 7, 3, best)[0], law)


def test_drafts_are_drawn_without_replacement():
    """Ordered pairs come with probability q(a) q(b) / (1 - q(a))."""
    log_q = torch.randn(1, V, generator=torch.Generator().manual_seed(5)).log_softmax(-1)
    rows = torch.arange(SAMPLES)
    pairs = sample_drafts(log_q.expand(SAMPLES, -1, -1), rows, torch.zeros_like(rows), 2)[:, 0]
    assert bool((pairs[:, 0] != pairs[:, 1]).all())
    q = log_q[0].exp().double()
    law = torch.zeros(V, V, dtype=torch.float64)
    for a, b in itertools.permutations(range(V), 2):
        law[a, b] = q[a] * q[b] / (1 - q[a])
    counts = torch.bincount(pairs[:, 0] * V + pairs[:, 1], minlength=V * V).double()
    assert chi_square_passes(counts, law.flatten())


def test_an_equal_drafter_is_always_accepted():
    """q = p at every node: the first child passes, so a chain is accepted to its end."""
    law = torch.full((V, V), 1.0 / V)
    log_q = law.log()[:3]
    tokens, _ = emit(law, log_q, 3, 1)
    assert fits(tokens, law)
    rows = torch.arange(64)
    ids = sample_drafts(log_q.expand(64, -1, -1), rows, rows, 1)
    weights = shape_weights(3, 1, ids.device).expand(ids.shape).contiguous()
    tree = build_tree(torch.zeros_like(rows), ids, weights, 4)
    path, tokens = walk(
        tree, lambda nodes: law[nodes], log_q.exp().expand(64, -1, -1), rows, rows, 1
    )
    assert path.count.tolist() == [4] * 64
    assert torch.equal(tokens[:, :3], ids[:, :, 0])
    assert torch.equal(path.nodes, torch.arange(4).expand(64, 4))


def test_a_greedy_target_accepts_only_its_token():
    """p with all mass on one token emits it, drafted or not."""
    law = torch.eye(V)[torch.arange(V).roll(1)]
    log_q = torch.randn(3, V, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    tokens, _ = emit(law, log_q, 7, 4)
    assert torch.equal(tokens, torch.tensor([V - 1, V - 2, V - 3]).expand(SAMPLES, -1))
