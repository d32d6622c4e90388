"""Adjusted, filtered, perturbed choice against plain float64 code, transformers and exact laws."""

import dataclasses
import itertools
import math
import threading

import pytest
import torch
from transformers.generation import logits_process as hf

from ddtree.kernels import sampling as kernels
from ddtree.kernels.reference import TorchOps
from ddtree.kernels.sampling import (
    Adjustments,
    Filters,
    Penalties,
    count_tokens,
    filter_logits,
    filter_threshold,
    process_logits,
    rank_candidates,
)
from ddtree.parallel import SINGLE, Part
from ddtree.runtime import sampler
from ddtree.runtime.sampler import (
    Sampling,
    choose,
    choose_nodes,
    path_logprobs,
    path_tokens,
    scaled_noise,
)
from ddtree.runtime.vocabulary import Vocabulary
from ddtree.tree import build_tree
from ddtree.tree.noise import gumbel

OPS = TorchOps(torch.device("cpu"))
NEUTRAL = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition": 1.0,
    "presence": 0.0, "frequency": 0.0, "bias": {}, "stops": (), "min_end": 0,
    "prompt": (), "output": (),
}  # fmt: skip


class Target:
    """A target whose hidden states are its logits."""

    parallel = SINGLE
    draft_tokens = None

    def __init__(self, vocab_size):
        self.vocab = Part.of(vocab_size)

    def logits(self, hidden):
        return hidden.clone()


def known(vocab_size):
    return Vocabulary(Target(vocab_size), OPS)


def params(**changes):
    assert set(changes) <= set(NEUTRAL)
    return NEUTRAL | changes


def sampling(rows, vocab):
    """The tensors of a list of parameters, everything present."""

    def column(name, dtype=torch.float32):
        return torch.tensor([row[name] for row in rows], dtype=dtype)

    def padded(lists, fill):
        width = max(len(entries) for entries in lists) + 2
        return torch.tensor([[*entries, *[fill] * (width - len(entries))] for entries in lists])

    counts = [torch.bincount(torch.tensor(r["output"]).long(), minlength=vocab) for r in rows]
    prompt = torch.zeros(len(rows), vocab, dtype=torch.bool)
    for seen, row in zip(prompt, rows, strict=True):
        seen[list(row["prompt"])] = True
    names = ("repetition", "presence", "frequency")
    return Sampling(
        Filters(column("temperature"), column("top_k", torch.int64), column("top_p"),
                column("min_p")),
        Adjustments(
            bias_ids=padded([list(row["bias"]) for row in rows], -1),
            bias_values=padded([list(row["bias"].values()) for row in rows], 7.0),
            stop_ids=padded([list(row["stops"]) for row in rows], -1),
            min_end=column("min_end", torch.int64),
            penalties=Penalties(
                **{name: column(name) for name in names},
                output_counts=torch.stack(counts).to(torch.int32),
                prompt_seen=prompt,
            ),
        ),
    )  # fmt: skip


def naive_adjust(logits, row, position, path=()):
    """Logits before temperature, in plain Python floats."""
    x = [float(value) for value in logits]
    for token, value in row["bias"].items():
        x[token] += value
    if position < row["min_end"]:
        for token in row["stops"]:
            x[token] = -math.inf
    output = [*row["output"], *path]
    for token in {*row["prompt"], *output}:
        x[token] = x[token] / row["repetition"] if x[token] > 0 else x[token] * row["repetition"]
    for token in set(output):
        x[token] -= row["frequency"] * output.count(token) + row["presence"]
    return x


def naive_probabilities(x, row):
    """The law after all filters; and how near a token's share is to being cut otherwise."""
    top = max(x)
    temperature = row["temperature"] or 1.0
    weight = {token: math.exp((value - top) / temperature) for token, value in enumerate(x)}
    if row["top_k"]:
        least = sorted(x)[-min(row["top_k"], len(x))]
        weight = {t: w for t, w in weight.items() if x[t] >= least}
    margin = math.inf
    if row["top_p"] < 1:
        total, mass, kept = sum(weight.values()), 0.0, {}
        for value in sorted({x[t] for t in weight}, reverse=True):
            margin = min(margin, abs(mass - row["top_p"] * total) / total)
            if mass >= row["top_p"] * total:
                break
            ties = {t: w for t, w in weight.items() if x[t] == value}
            # vLLM adds tokens one by one; the last one needed brings those that tie with it.
            kept |= ties
            mass += sum(ties.values())
        weight = kept
    for w in set(weight.values()) - {1.0}:
        margin = min(margin, abs(w - row["min_p"]))
    weight = {t: w for t, w in weight.items() if w >= row["min_p"]}
    total = sum(weight.values())
    return {t: w / total for t, w in weight.items() if w > 0}, margin


FILTERS = {
    "none": {},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.15, "temperature": 1.4},
    "all": {"top_k": 6, "top_p": 0.9, "min_p": 0.05, "temperature": 0.8},
    "penalties": {"repetition": 1.4, "presence": 0.3, "frequency": 0.2, "prompt": (1, 2, 3),
                  "output": (3, 3, 5)},
    "bias": {"bias": {2: 1.5, 7: -100.0}, "stops": (0, 4), "min_end": 9},
}  # fmt: skip


@pytest.mark.parametrize("name", FILTERS)
def test_sampled_tokens_have_the_exact_law(name, monkeypatch):
    vocab, samples, position = 10, 30_000, 5
    # Small digits: histograms much longer than the vocabulary would take all the time.
    monkeypatch.setattr(kernels, "RADIX", tuple((shift, 4) for shift in range(28, -1, -4)))
    row = params(**FILTERS[name])
    logits = 1.5 * torch.randn(vocab, generator=torch.Generator().manual_seed(3))
    law, _ = naive_probabilities(naive_adjust(logits, row, position), row)
    one = sampling([row], vocab)
    many = sampler._take_rows(one, torch.zeros(samples, dtype=torch.int64))
    seeds = torch.arange(samples) * 7 - 1000
    length = torch.full((samples,), position - 1)
    noise = scaled_noise(seeds, many.filters.temperature, length, 1, vocab)
    zeros = torch.zeros(samples, 1, dtype=torch.int64)
    hidden = logits.expand(samples, 1, vocab)
    chosen = choose_nodes(known(vocab), hidden, noise, many, zeros, zeros + position)
    counts = torch.bincount(chosen.flatten(), minlength=vocab)
    assert {t for t in range(vocab) if counts[t]} <= set(law)
    chi2 = sum((int(counts[t]) - samples * p) ** 2 / (samples * p) for t, p in law.items())
    free = len(law) - 1
    # Wilson-Hilferty: the chi-square quantile that is passed with probability 0.001.
    bound = free * (1 - 2 / (9 * free) + 3.09 * math.sqrt(2 / (9 * free))) ** 3
    assert chi2 < bound, (chi2, bound, law)


def random_rows(count, vocab, generator):
    def pick(*values):
        return values[int(torch.randint(len(values), (), generator=generator))]

    def tokens(most):
        size = int(torch.randint(most + 1, (), generator=generator))
        return tuple(torch.randint(vocab, (size,), generator=generator).tolist())

    return [
        params(
            temperature=pick(0.0, 0.3, 0.7, 1.0, 1.5), top_k=pick(0, 1, 3, 20, vocab, vocab + 5),
            top_p=pick(1.0, 0.9, 0.5, 0.05, 0.999), min_p=pick(0.0, 0.0, 0.05, 0.3, 1.0),
            repetition=pick(1.0, 1.3, 0.7), presence=pick(0.0, 0.5, -0.5),
            frequency=pick(0.0, 0.25, -1.0), bias=dict.fromkeys(tokens(4), pick(-100.0, 3.0)),
            stops=tokens(3), min_end=pick(0, 12), prompt=tokens(9), output=tokens(9),
        )
        for _ in range(count)
    ]  # fmt: skip


def random_logits(shape, generator, coarse):
    logits = 3 * torch.randn(shape, generator=generator)
    return logits.mul_(4).round_().div_(4) if coarse else logits


@pytest.mark.parametrize("coarse", [False, True])
def test_everything_together_equals_plain_code(coarse):
    """Mixed rows, node paths, ties: kept tokens and chosen tokens."""
    generator = torch.Generator().manual_seed(11 + coarse)
    vocab, nodes, depth, checked = 60, 4, 3, 0
    for _ in range(12):
        rows = random_rows(6, vocab, generator)
        logits = random_logits((6, nodes, vocab), generator, coarse)
        paths = torch.randint(-1, 8, (6, nodes, depth), generator=generator)
        depths = (paths >= 0).sum(2)
        length = torch.randint(8, 12, (6,), generator=generator)
        positions = length[:, None] + depths + 1
        tensors = sampling(rows, vocab)
        seeds = torch.randint(2**40, (6,), generator=generator)
        noise = scaled_noise(seeds, tensors.filters.temperature, length, depth + 1, vocab)
        chosen = choose_nodes(known(vocab), logits, noise, tensors, depths, positions, paths)
        adjusted = process_logits(logits.clone(), positions, paths, tensors.adjustments)
        filtered = filter_logits(adjusted.clone(), tensors.filters)
        plain_noise = gumbel(seeds, length[:, None] + torch.arange(1, depth + 2), 0, vocab)
        for b, row in enumerate(rows):
            for n in range(nodes):
                path = [t for t in paths[b, n].tolist() if t >= 0]
                x = naive_adjust(logits[b, n], row, int(positions[b, n]), path)
                exact = torch.tensor(x)
                assert torch.allclose(adjusted[b, n], exact, atol=1e-4), row
                # Filters see the float32 logits: ties made by rounding are ties.
                law, margin = naive_probabilities(adjusted[b, n].tolist(), row)
                if margin > 1e-5:
                    kept = {t for t in range(vocab) if float(filtered[b, n, t]) > -1e30}
                    # A token may be kept whose probability is 0 in plain code.
                    assert set(law) <= kept and all(x[t] < max(x) - 30 for t in kept - set(law))
                    scores = {
                        t: float(adjusted[b, n, t])
                        + row["temperature"] * float(plain_noise[b, depths[b, n], t])
                        for t in law
                    }
                    best = max(scores, key=lambda t: (scores[t], -t))
                    second = max([s for t, s in scores.items() if t != best], default=-math.inf)
                    if row["temperature"] == 0 or scores[best] - second > 1e-5:
                        assert int(chosen[b, n]) == best
                        checked += 1
    assert checked > 250, checked


@pytest.mark.parametrize(
    "changes, warper",
    [
        ({"top_k": 7}, lambda: hf.TopKLogitsWarper(7)),
        ({"top_p": 0.7}, lambda: hf.TopPLogitsWarper(0.7)),
        ({"top_p": 0.97}, lambda: hf.TopPLogitsWarper(0.97)),
        ({"min_p": 0.1}, lambda: hf.MinPLogitsWarper(0.1)),
    ],
)
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_filters_keep_what_transformers_keeps(changes, warper, temperature):
    generator = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(64, 1, 500, generator=generator)
    tensors = sampling([params(temperature=temperature, **changes)] * 64, 500).filters
    kept = filter_logits(logits.clone(), tensors)[:, 0] > -1e30
    expected = warper()(None, hf.TemperatureLogitsWarper(temperature)(None, logits[:, 0]))
    wrong = (kept != expected.isfinite()).any(1).sum()
    assert wrong <= 1  # a share within rounding of the boundary
    assert 0 < int(kept.sum()) < kept.numel() / 2


def test_repetition_penalty_is_that_of_transformers():
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(1, 1, 50, generator=generator)
    row = params(repetition=1.7, prompt=(3, 4, 4), output=(4, 9, 9))
    got = process_logits(logits.clone(), torch.zeros(1, 1), None, sampling([row], 50).adjustments)
    seen = torch.tensor([[*row["prompt"], *row["output"]]])
    expected = hf.RepetitionPenaltyLogitsProcessor(1.7)(seen, logits[:, 0].clone())
    assert torch.allclose(got[:, 0], expected, atol=1e-6)
    assert not torch.equal(got, logits)


def test_ties_at_a_threshold_are_kept():
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0, -0.0, 0.0, -1.0, -torch.inf]).view(1, 1, -1)

    def kept(**changes):
        least = filter_threshold(logits, sampling([params(**changes)], 9).filters)
        return int((logits >= least.unsqueeze(2)).sum())

    assert [kept(top_k=k) for k in (0, 1, 2, 3, 4, 5, 7, 8, 9, 30)] == [
        9,
        1,
        4,
        4,
        4,
        7,
        7,
        8,
        9,
        9,
    ]
    total = math.exp(2) + 3 * math.exp(1) + 3 + math.exp(-1)
    assert kept(top_p=math.exp(2) / total - 1e-4) == 1
    assert kept(top_p=math.exp(2) / total + 1e-4) == 4
    assert kept(top_p=(total - 3 - math.exp(-1)) / total + 1e-4) == 7
    assert kept(top_p=1e-9) == 1
    # Renormalised: of the top 4's mass, the first alone has more than 0.47.
    assert kept(top_k=2, top_p=0.47) == 1 and kept(top_p=0.47) == 4
    assert kept(min_p=math.exp(-1) - 1e-4) == 4 and kept(min_p=math.exp(-1) + 1e-4) == 1
    assert kept(min_p=1.0) == 1


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e4])
def test_top_k_is_exact_at_every_magnitude(scale):
    generator = torch.Generator().manual_seed(6)
    logits = scale * torch.randn(8, 1, 3000, generator=generator)
    top_k = torch.tensor([1, 2, 3, 50, 1499, 1500, 2999, 3000])
    least = filter_threshold(logits, Filters(torch.ones(8), top_k=top_k))
    ordered = logits[:, 0].sort(1, descending=True)[0]
    assert torch.equal(least, ordered.gather(1, top_k[:, None] - 1))


def boundary_case(generator):
    """Logits in four groups of ties, and top-p right where the second group is enough."""
    levels = torch.tensor([0.7, 0.1, -0.9, -3.0])
    group = torch.randint(4, (1, 1, 5000), generator=generator)
    logits = levels[group]
    mass = torch.exp(logits.double() - 0.7)
    exact = float(mass[logits >= 0.1].sum() / mass.sum())
    return logits, [exact + step * 1e-8 for step in range(-40, 41)]


def test_top_p_does_not_depend_on_the_order_of_the_vocabulary():
    """Right at a boundary, where sums of floats change their mind."""
    generator = torch.Generator().manual_seed(8)
    for _ in range(3):
        logits, shares = boundary_case(generator)
        filters = Filters(torch.ones(81), top_p=torch.tensor(shares, dtype=torch.float64))
        logits = logits.expand(81, 1, -1)
        least = filter_threshold(logits, filters)
        assert set(least.flatten().tolist()) == {float(logits.new_tensor(v)) for v in (0.1, -0.9)}
        for _ in range(8):
            order = torch.randperm(5000, generator=generator)
            assert torch.equal(filter_threshold(logits[:, :, order], filters), least)


def run_shards(work, count):
    """Call `work(shard, all_sum, all_max)` for all shards at once; their reductions meet."""
    barrier, slots, results = threading.Barrier(count, timeout=20), [None] * count, [None] * count

    def reducer(shard, combine):
        def reduce(x):
            slots[shard] = x
            barrier.wait()
            total = combine(torch.stack(slots))
            barrier.wait()
            return total

        return reduce

    def run(shard):
        results[shard] = work(
            shard, reducer(shard, lambda x: x.sum(0)), reducer(shard, lambda x: x.amax(0))
        )

    threads = [threading.Thread(target=run, args=(shard,)) for shard in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_shards_of_the_vocabulary_agree_with_the_whole():
    generator = torch.Generator().manual_seed(9)
    vocab, cuts = 61, (0, 20, 41, 61)
    rows = random_rows(12, vocab, generator)
    logits = random_logits((12, 3, vocab), generator, coarse=True)
    paths = torch.randint(-1, vocab, (12, 3, 4), generator=generator)
    positions = torch.full((12, 3), 11)
    whole = sampling(rows, vocab)
    adjusted = process_logits(logits.clone(), positions, paths, whole.adjustments)
    least = filter_threshold(adjusted, whole.filters)

    def work(shard, all_sum, all_max):
        first, end = cuts[shard], cuts[shard + 1]
        penalties = whole.adjustments.penalties
        own = dataclasses.replace(
            penalties,
            output_counts=penalties.output_counts[:, first:end],
            prompt_seen=penalties.prompt_seen[:, first:end],
        )
        adjustments = dataclasses.replace(whole.adjustments, penalties=own)
        x = logits[..., first:end].contiguous()
        x = process_logits(x, positions, paths, adjustments, first)
        return x, filter_threshold(x, whole.filters, all_sum, all_max)

    results = run_shards(work, 3)
    assert torch.equal(torch.cat([x for x, _ in results], 2), adjusted)
    for _, shard_least in results:
        assert torch.equal(shard_least, least)


def test_a_level_does_not_change_the_tokens_of_lower_rows():
    """Greedy and plainly sampled rows beside rows that use everything; and alone."""
    generator = torch.Generator().manual_seed(10)
    vocab, nodes = 300, 6
    plain = [params(temperature=0.0), params(temperature=0.8)] * 3
    others = random_rows(6, vocab, generator)
    rows = [row for pair in zip(plain, others, strict=True) for row in pair]
    logits = random_logits((12, nodes, vocab), generator, coarse=True)
    paths = torch.randint(-1, vocab, (12, nodes, 5), generator=generator)
    depths = torch.randint(6, (12, nodes), generator=generator)
    length = torch.randint(100, (12,), generator=generator)
    positions = length[:, None] + depths + 1
    full = sampling(rows, vocab)
    noise = scaled_noise(torch.arange(12), full.filters.temperature, length, 6, vocab)
    everything = known(vocab)
    got = choose_nodes(everything, logits, noise, full, depths, positions, paths)[::2]
    low = Sampling(Filters(full.filters.temperature[::2]))
    alone = choose_nodes(everything, logits[::2], noise[::2], low, depths[::2], positions[::2])
    assert torch.equal(got, alone)
    greedy = choose(everything, logits[::4])
    assert torch.equal(got[::2], greedy)
    assert not torch.equal(got[1::2], choose(everything, logits[2::4]))


def test_blocks_do_not_change_tokens(monkeypatch):
    generator = torch.Generator().manual_seed(12)
    vocab, nodes = 40, 7
    rows = random_rows(5, vocab, generator)
    logits = random_logits((5, nodes, vocab), generator, coarse=False)
    paths = torch.randint(-1, vocab, (5, nodes, 3), generator=generator)
    depths, length = (paths >= 0).sum(2), torch.arange(5) + 8
    tensors = sampling(rows, vocab)
    noise = scaled_noise(torch.arange(5), tensors.filters.temperature, length, 4, vocab)
    positions = length[:, None] + depths + 1

    def run():
        everything = known(vocab)
        hidden = logits[..., :vocab]
        own = path_logprobs(everything, hidden, depths, 3)
        return choose_nodes(everything, hidden, noise, tensors, depths, positions, paths), *own

    expected = run()
    for chunk, block in ((40, 40), (200, 80), (600, 400), (10**6, 290), (10**6, 600)):
        monkeypatch.setattr(sampler, "CHUNK_LOGITS", chunk)
        monkeypatch.setattr(sampler, "CPU_BLOCK_LOGITS", block)
        for got, want in zip(run(), expected, strict=True):
            assert torch.equal(got, want)


def test_a_perfect_drafter_proposes_what_is_chosen():
    """Coupling: a candidate at depth d sees the noise that its parent chooses with."""
    generator = torch.Generator().manual_seed(13)
    vocab, depth = 2000, 5
    logits = random_logits((3, depth, vocab), generator, coarse=False)
    temperature = torch.tensor([0.7, 1.0, 1.5])
    length = torch.tensor([3, 40, 500])
    noise = scaled_noise(torch.arange(3), temperature, length, depth + 1, vocab)
    ones = torch.ones(depth)
    ids, _ = rank_candidates(logits, temperature, 8, noise[:, :depth], ones, ones)
    depths = torch.arange(depth).expand(3, depth)
    chosen = choose_nodes(
        known(vocab),
        logits,
        noise,
        Sampling(Filters(temperature)),
        depths,
        depths,
    )
    assert torch.equal(ids[..., 0], chosen)
    assert not torch.equal(rank_candidates(logits, temperature, 8)[0][..., 0], chosen)
    # Position len + d + 1 for the nodes at depth d, under the seed's own noise.
    by_hand = logits[1, 2] + gumbel(torch.tensor([1]), torch.tensor([[43]]), 0, vocab)[0, 0]
    assert int(by_hand.argmax()) == int(chosen[1, 2])


def test_candidates_are_the_best_of_the_whole_vocabulary():
    generator = torch.Generator().manual_seed(14)
    vocab, depth, count = 500, 4, 12
    logits = random_logits((4, depth, vocab), generator, coarse=False)
    temperature = torch.tensor([0.0, 0.5, 1.0, 2.0])
    alpha, scale = torch.tensor([1.0, 1.5, 2.0, 4.0]), torch.tensor([2.0, 1.0, 0.5, 3.0])
    length = torch.zeros(4, dtype=torch.int64)
    noise = scaled_noise(torch.arange(4), temperature, length, depth, vocab)
    g = gumbel(torch.arange(4), torch.arange(1, depth + 1).expand(4, depth), 0, vocab).double()
    ids, weights = rank_candidates(logits, temperature, count, noise, alpha, scale)
    for b in (1, 2, 3):
        log_q = torch.log_softmax(logits[b].double() / float(temperature[b]), -1)
        scores = alpha[:, None] * log_q + g[b]
        best, expected = scores.topk(count, -1)
        assert torch.equal(ids[b], expected)
        exact = torch.log_softmax(best / scale[:, None], -1)
        assert torch.allclose(weights[b].double(), exact, atol=1e-4)
    plain_ids, plain = rank_candidates(logits, temperature, count)
    exact = torch.log_softmax(logits.double() / torch.tensor([1, 0.5, 1, 2])[:, None, None], -1)
    assert torch.allclose(plain.double(), exact.topk(count, -1)[0], atol=1e-5)
    # A greedy row's candidates are those of a greedy round, bit for bit, coupled or not.
    greedy_ids, greedy = OPS.top_candidates(logits, count)
    for got_ids, got in ((ids, weights), (plain_ids, plain)):
        assert torch.equal(got_ids[0], greedy_ids[0]) and torch.equal(got[0], greedy[0])
    assert (weights[..., :-1] >= weights[..., 1:]).all() and (weights <= 0).all()


@pytest.mark.parametrize("temperature", [1e-38, 1e-6, 1e4])
def test_extreme_temperatures(temperature):
    generator = torch.Generator().manual_seed(15)
    logits = random_logits((1, 3, 200), generator, coarse=False)
    tensors = sampling([params(temperature=temperature, top_p=0.9, min_p=0.01, top_k=50)], 200)
    zero, rows = torch.zeros(1, dtype=torch.int64), torch.arange(3)[None]
    noise = scaled_noise(zero, tensors.filters.temperature, zero, 3, 200)
    chosen = choose_nodes(known(200), logits, noise, tensors, rows, rows)
    ones = torch.ones(3)
    ids, weights = rank_candidates(logits, tensors.filters.temperature, 9, noise, ones, ones)
    assert not weights.isnan().any() and (weights[..., 0] > -3).all()
    if temperature < 1:
        assert torch.equal(chosen, logits.argmax(-1)) and torch.equal(ids[..., 0], chosen)


def test_logprobs_are_those_of_the_raw_distribution():
    generator = torch.Generator().manual_seed(16)
    logits = random_logits((2, 3, 700), generator, coarse=False)
    chosen = torch.randint(700, (2, 3), generator=generator)
    exact = torch.log_softmax(logits.double(), -1)
    own, ids, best = path_logprobs(known(700), logits, chosen, 5)
    assert torch.allclose(own.double(), exact.gather(2, chosen[..., None])[..., 0], atol=1e-5)
    values, places = exact.topk(5, -1)
    assert torch.equal(ids, places) and torch.allclose(best.double(), values, atol=1e-5)
    assert path_logprobs(known(700), logits, chosen, 0)[1].shape == (2, 3, 0)


def test_counts_follow_the_emitted_tokens():
    generator = torch.Generator().manual_seed(17)
    vocab, cuts = 12, (0, 5, 12)
    whole = torch.zeros(4, vocab, dtype=torch.int32)
    parts = [torch.zeros(4, b - a, dtype=torch.int32) for a, b in itertools.pairwise(cuts)]
    expected = torch.zeros_like(whole)
    for _ in range(30):
        slots = torch.randperm(4, generator=generator)[:3]
        tokens = torch.randint(vocab, (3, 6), generator=generator)
        kept = torch.randint(7, (3,), generator=generator)
        count_tokens(whole, slots, tokens, kept)
        for part, first in zip(parts, cuts, strict=False):
            count_tokens(part, slots, tokens, kept, first)
        for slot, row, count in zip(slots.tolist(), tokens.tolist(), kept.tolist(), strict=True):
            for token in row[:count]:
                expected[slot, token] += 1
    assert torch.equal(whole, expected)
    assert torch.equal(torch.cat(parts, 1), expected)


def test_path_tokens_are_the_ancestors():
    generator = torch.Generator().manual_seed(18)
    ids = torch.rand(3, 4, 6, generator=generator).argsort(-1)
    weights = torch.randn(3, 4, 6, generator=generator).log_softmax(-1).sort(-1, True)[0]
    tree = build_tree(torch.tensor([90, 91, 92]), ids, weights, 20, torch.tensor([19, 3, 0]))
    paths = path_tokens(tree, 4)
    for b in range(3):
        for n in range(20):
            if not tree.valid[b, n]:
                continue
            node, expected = n, []
            while node:
                expected.append(int(tree.tokens[b, node]))
                node = int(tree.parents[b, node])
            assert paths[b, n].tolist() == expected + [-1] * (4 - len(expected))


def on_meta(value):
    if dataclasses.is_dataclass(value):
        parts = {f.name: on_meta(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return value.to("meta")


def test_runs_on_meta():
    """Nothing asks the host for a value."""
    vocab = 50
    rows = random_rows(3, vocab, torch.Generator().manual_seed(1))
    tensors = on_meta(sampling(rows, vocab))
    whole = torch.empty(3, 4, dtype=torch.int64, device="meta")
    paths, slots = whole[:, :, None].expand(3, 4, 2), whole[:, 0]
    noise = scaled_noise(slots, tensors.filters.temperature, slots, 3, vocab)
    hidden = torch.empty(3, 4, vocab, device="meta")
    chosen = choose_nodes(known(vocab), hidden, noise, tensors, whole, whole, paths)
    assert chosen.shape == (3, 4)
    ones = torch.ones(3, device="meta")
    for options in ((), (noise, ones, ones)):
        ids, weights = rank_candidates(hidden[:, :3], tensors.filters.temperature, 5, *options)
        assert ids.shape == weights.shape == (3, 3, 5)
    assert path_logprobs(known(vocab), hidden, whole, 2)[1].shape == (3, 4, 2)
    count_tokens(tensors.adjustments.penalties.output_counts, slots, whole, slots)
    assert kernels.filter_threshold(hidden, tensors.filters).shape == (3, 4)
