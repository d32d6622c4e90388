"""Sampled output is a function of weights, prompt, parameters and seed: over all settings."""

import dataclasses
import functools
import itertools

import pytest
import torch
from fixtures import TINY_EOS, tiny_target
from sampling_oracle import SampledAgreement, assert_logprobs, sequences
from stubs import (
    FULL,
    PARTLY,
    SIBLINGS,
    Stub,
    by_anchor,
    cases,
    check_engines,
    hf_model,
    install,
    tiny_engine,
    tiny_tokenizer,
)

from ddtree import SamplingParams

TEMPERATURES = (0.3, 0.7, 1.0, 1.5)
COMBINED = {"top_k": 20, "top_p": 0.9, "min_p": 0.05}
EVERYTHING = {
    "repetition_penalty": 1.2,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": {5: 2.0, 60: -1.5},
    "min_new_tokens": 6,
}
BUDGETS = (1, 7, 16, 64)
BATCHES = (1, 3, 8)
PAGES = (1, 16)
DRAFTERS = {"oracle": FULL, "mixed": PARTLY}
TOKENS = 12


@pytest.fixture(autouse=True)
def pages_free():
    """Every test leaves every engine with all its pages."""
    yield
    check_engines()


@pytest.fixture(scope="module")
def agreement():
    """Near-ties of the whole module, judged together."""
    agreement = SampledAgreement(tiny_target(), TINY_EOS)
    yield agreement
    agreement.close()


@functools.cache
def engine(budget, page_size=4, batch=3, coupling=True, prefill_chunk=2048, num_pages=None):
    return tiny_engine(
        budget=budget,
        page_size=page_size,
        max_batch_size=batch,
        coupling=coupling,
        prefill_chunk=prefill_chunk,
        num_pages=num_pages,
        max_model_len=120,
    )


@functools.cache
def jobs():
    """Every temperature, with and without filters, and a greedy request: prompt, parameters."""
    kinds = [{"temperature": t, **f} for t in TEMPERATURES for f in ({}, COMBINED)]
    params = [
        SamplingParams(seed=40 + i, max_new_tokens=TOKENS, ignore_eos=True, **kind)
        for i, kind in enumerate([*kinds, {}])
    ]
    return [(cases()[i].prompt, p) for i, p in enumerate(params)]


def but(jobs, **changes):
    return [(prompt, dataclasses.replace(params, **changes)) for prompt, params in jobs]


_PLAIN = {}


def plain(jobs):
    """Output ids by plain decoding, one request at a time."""
    jobs = but(jobs, speculation="off", budget=None)
    for prompt, params in jobs:
        key = (*prompt, str(params))
        if key not in _PLAIN:
            (_PLAIN[key],) = sequences(engine(0, batch=1).generate, [(prompt, params)])
    return [_PLAIN[(*prompt, str(params))] for prompt, params in jobs]


def draft(engine, jobs, ranks):
    """Let the engine's drafter know what plain decoding makes of `jobs`."""
    pairs = zip(jobs, plain(jobs), strict=True)
    install(engine, by_anchor((len(prompt), prompt + ids) for (prompt, _), ids in pairs), ranks)


def compare(agreement, jobs, outputs, label):
    """Every token is the oracle's; and all outputs are plain decoding's but for near-ties."""
    for (prompt, params), output, want in zip(jobs, outputs, plain(jobs), strict=True):
        before = len(agreement.ties)
        agreement.check(prompt, params, output.seed, output.token_ids, label)
        assert output.token_ids == want or len(agreement.ties) > before, label
        assert output.seed == params.seed


FAST = ((3, False, 16), (8, True, 1))
CELLS = [
    pytest.param(*cell, marks=() if cell in FAST else pytest.mark.slow)
    for cell in itertools.product(BATCHES, (True, False), PAGES)
]


@pytest.mark.parametrize("batch, coupling, page_size", CELLS)
def test_full_cross(agreement, batch, coupling, page_size):
    """Budgets x chain and tree x drafters x temperatures x filters, for every batch and page."""
    outputs = engine(0, page_size, batch).generate(*map(list, zip(*jobs(), strict=True)))
    compare(agreement, jobs(), outputs, f"batch {batch} off")
    for budget, drafter in itertools.product(BUDGETS, DRAFTERS):
        tested = engine(budget, page_size, batch, coupling)
        draft(tested, jobs(), DRAFTERS[drafter])
        for mode in ("tree", "chain") if budget == 7 else ("tree",):
            label = f"batch {batch} page {page_size} {coupling} budget {budget} {mode} {drafter}"
            work = but(jobs(), speculation=mode)
            outputs = tested.generate(*map(list, zip(*work, strict=True)))
            compare(agreement, work, outputs, label)
            rounds = sum(output.stats.rounds for output in outputs)
            most = (TOKENS - 1) * len(work)
            limit = {1: 0.7, 7: 0.5, 16: 0.5, 64: 0.5}[budget] if mode == "tree" else 0.75
            assert rounds < limit * most, (label, rounds / most)


class TargetItself(Stub):
    """Drafts with the target's own hidden states, along the known sequences."""

    def __init__(self, target, inner, known):
        super().__init__(target, inner)
        self._known = {}
        for start, tokens in known:
            with torch.inference_mode():
                states = hf_model(tiny_target()).model(torch.tensor([tokens])).last_hidden_state[0]
            for position in range(start, len(tokens)):
                self._known[position, tokens[position]] = states[position:]

    def __call__(self, embeddings, state, kv):
        hidden = super().__call__(embeddings, state, kv)
        anchors = (embeddings[:, 0, None] == self.target.embedding).all(-1).int().argmax(1)
        places = zip(state.positions[:, 0].tolist(), anchors.tolist(), strict=True)
        for row, place in enumerate(places):
            states = self._known[place][: hidden.shape[1] - 1]
            hidden[row, 1 : 1 + len(states)] = states
        return hidden


@pytest.mark.parametrize("mode", ["chain", "tree"])
def test_a_perfect_drafter_knows_every_sampled_token(mode):
    """Coupled to the same noise, the target's own distributions are accepted as a whole."""
    work = [
        (c.prompt, SamplingParams(max_new_tokens=13, ignore_eos=True, seed=i, temperature=t))
        for i, (c, t) in enumerate(zip(cases()[:3], (0.7, 1.0, 1.5), strict=True))
    ]
    known = [(len(p), p + ids) for (p, _), ids in zip(work, plain(work), strict=True)]
    rounds = {}
    for coupling in (True, False):
        tested = tiny_engine(budget=64, max_batch_size=3, max_model_len=120, coupling=coupling)
        runner = tested._loop.runner
        machine = runner.machine
        stub = TargetItself(machine.target, machine.drafter, known)
        weights = machine.weights
        if weights is not None:
            # Such a drafter deserves sharp weights: the tree follows its first choices.
            weights = dataclasses.replace(weights, scale=weights.scale / 100)
        runner.machine = dataclasses.replace(machine, drafter=stub, weights=weights)
        outputs = tested.generate(*map(list, zip(*but(work, speculation=mode), strict=True)))
        assert [output.token_ids for output in outputs] == plain(work)
        rounds[coupling] = [output.stats.rounds for output in outputs]
    assert rounds[True] == [2, 2, 2], rounds
    assert sum(rounds[False]) > 9


# -- in trouble -----------------------------------------------------------------------------------

FEW = {
    "logit_bias": dict.fromkeys(range(7, 101), -100.0),
    "frequency_penalty": 1.5,
    "repetition_penalty": 1.3,
    "min_new_tokens": 20,
}
"""Seven tokens that are kept in balance by how often each came before: a miscount shows soon."""
ROUGH = {
    "chunks of 3": {"prefill_chunk": 3},
    "preempted": {"page_size": 1, "num_pages": 82},
    "preempted, in chunks": {"page_size": 1, "num_pages": 82, "prefill_chunk": 5},
}


@pytest.mark.parametrize("setting", ROUGH)
def test_chunked_preempted_and_resumed(agreement, setting):
    """A resumed request goes on with the same noise, counts and minimum length."""
    chosen = sorted(cases(), key=lambda c: len(c.prompt))
    kinds = [{"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.0, **COMBINED}]
    work = [
        (c.prompt, SamplingParams(seed=i, max_new_tokens=25, **kinds[i % 3], **extra))
        for i, (c, extra) in enumerate(zip(chosen, itertools.cycle([FEW, {}, EVERYTHING, FEW])))
    ]
    tested = engine(7, batch=4, **{"page_size": 4, **ROUGH[setting]})
    draft(tested, work, PARTLY)
    before = tested.describe()["preemptions"]
    outputs = tested.generate(*map(list, zip(*work)))
    compare(agreement, work, outputs, setting)
    preempted = tested.describe()["preemptions"] > before
    assert preempted == setting.startswith("preempted")


# -- parameters -----------------------------------------------------------------------------------

ADJUSTED = {
    "repetition": {"repetition_penalty": 1.5},
    "repetition wanted": {"repetition_penalty": 0.7},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.1},
    "both wanted": {"presence_penalty": -0.5, "frequency_penalty": -0.4},
    "bias": {"logit_bias": {t: 100.0 if t == 7 else -100.0 for t in (7, 11)}},
    "bans": {"logit_bias": dict.fromkeys(range(0, 101, 2), -100.0)},
    "minimum": {"min_new_tokens": 15},
    "the end after six": {"min_new_tokens": 6, "logit_bias": {99: 100.0}},
    "everything": EVERYTHING,
}


@pytest.mark.parametrize("name", ADJUSTED)
def test_adjusted_choices(agreement, name):
    """At temperatures 0 and 0.8; tree and chain equal plain decoding, drafts being accepted."""
    picked = [c for c in cases() if c.answer[-1] in TINY_EOS][:2] + cases()[:2]
    work = [
        (c.prompt, SamplingParams(max_new_tokens=18, seed=9, temperature=t, **ADJUSTED[name]))
        for c, t in zip(picked * 2, [0.0] * 4 + [0.8] * 4, strict=True)
    ]
    tested = engine(16, batch=8)
    rounds = {}
    for mode, ranks in (("tree", SIBLINGS), ("chain", FULL), ("off", FULL)):
        draft(tested, work, ranks)
        outputs = tested.generate(*map(list, zip(*but(work, speculation=mode))))
        compare(agreement, work, outputs, f"{name} {mode}")
        rounds[mode] = sum(output.stats.rounds for output in outputs)
        for output, (_, params) in zip(outputs, work, strict=True):
            ids = output.token_ids
            if name == "bias":
                assert set(ids) == {7}
            if name == "the end after six":
                assert ids.index(99) == len(ids) - 1 == 6
            if name == "bans":
                assert all(token % 2 for token in ids)
            assert not set(ids[: params.min_new_tokens - 1]) & set(TINY_EOS)
            assert len(ids) >= params.min_new_tokens
    assert max(rounds["tree"], rounds["chain"]) < 0.6 * rounds["off"]
    plain_work = but(work, **{f: getattr(SamplingParams(), f) for f in ADJUSTED[name]})
    assert plain(plain_work) != plain(work), "the adjustment changes nothing here"


@pytest.mark.parametrize("count", [0, 5, 20])
def test_logprobs(agreement, count):
    """Tree, chain and plain decoding report the same numbers, those of a plain forward."""
    extra = {**EVERYTHING, "max_new_tokens": 10, "logprobs": count}
    work = [
        (cases()[0].prompt, SamplingParams(max_new_tokens=10, logprobs=count)),
        (cases()[1].prompt, SamplingParams(max_new_tokens=1, logprobs=count)),
        (cases()[2].prompt, SamplingParams(temperature=0.8, seed=3, **extra)),
        (cases()[3].prompt, SamplingParams(temperature=1.0, seed=3, max_new_tokens=10)),
    ]
    tested = engine(16)
    for mode, ranks in (("tree", SIBLINGS), ("chain", FULL), ("off", FULL)):
        draft(tested, work, ranks)
        outputs = tested.generate(*map(list, zip(*but(work, speculation=mode))))
        compare(agreement, work, outputs, f"logprobs {mode}")
        for output, (prompt, params) in zip(outputs, work, strict=True):
            if params.logprobs is None:
                assert output.logprobs is None
            else:
                found = output.logprobs
                assert_logprobs(tiny_target(), prompt, output.token_ids, found, count)


def test_logprobs_end_with_the_tokens():
    """Where a stop string cuts a round's tokens, their logprobs are cut, too."""
    with tiny_engine(tokenizer=tiny_tokenizer()) as tested:
        case = cases()[0]
        draft(tested, [(case.prompt, SamplingParams(max_new_tokens=12))], FULL)
        stop = tested.tokenizer.decode(case.answer[3:5])
        params = SamplingParams(max_new_tokens=12, logprobs=2, stop=stop)
        (output,) = tested.generate(case.prompt, params)
        assert output.token_ids == case.answer[:5] and len(output.logprobs) == 5
        assert output.stats.rounds == 1


def test_stop_strings_wait_for_the_minimum():
    """As in vLLM: a stop string completed by the first min_new_tokens tokens does not count."""
    with tiny_engine(tokenizer=tiny_tokenizer()) as tested:
        case = next(c for c in cases() if len(c.answer) > 20)
        text = tested.tokenizer.decode
        at = next(i for i in range(3, 9) if case.answer[i] in case.answer[i + 1 : 20])
        again = case.answer.index(case.answer[at], at + 1)
        for minimum, count in ((0, at + 1), (at, at + 1), (at + 1, again + 1)):
            first = case.answer.index(case.answer[at]) if minimum == 0 else at
            params = SamplingParams(
                max_new_tokens=25, min_new_tokens=minimum, stop=text([case.answer[at]])
            )
            for mode in ("tree", "off"):
                (output,) = tested.generate(
                    case.prompt, dataclasses.replace(params, speculation=mode)
                )
                assert len(output.token_ids) == (first + 1 if minimum == 0 else count)
                assert output.stop_reason == params.stop[0]


# -- seeds ----------------------------------------------------------------------------------------


def test_seeds():
    """Seeds differ; without one, one is drawn, and gives the same output again."""
    tested, prompt = engine(16), cases()[0].prompt
    free = SamplingParams(max_new_tokens=8, temperature=1.0, ignore_eos=True)
    made = [
        tested.generate(prompt, dataclasses.replace(free, seed=seed))[0]
        for seed in (0, 1, 2, -1, 2**62, 2**63 - 1, -(2**63))
    ]
    assert len({tuple(output.token_ids) for output in made}) == len(made)
    drawn = tested.generate([prompt] * 5, free)
    assert len({output.seed for output in drawn}) == 5
    assert len({tuple(output.token_ids) for output in drawn}) == 5
    for output in drawn:
        params = dataclasses.replace(free, seed=output.seed, speculation="off")
        (again,) = tested.generate(prompt, params)
        assert again.token_ids == output.token_ids and again.seed == output.seed
    greedy = tested.generate([prompt] * 2, [SamplingParams(), SamplingParams(seed=3)])
    assert [output.seed for output in greedy] == [None, 3]
    assert greedy[0].token_ids == greedy[1].token_ids


def test_a_stream_of_sampled_tokens():
    """Streams give what `generate` gives, beside each other."""
    tested = engine(7)
    want = plain(jobs())
    streams = {i: tested.stream(prompt, params) for i, (prompt, params) in enumerate(jobs()[:3])}
    got = {i: [] for i in streams}
    while streams:
        for i, stream in list(streams.items()):
            delta = next(stream, None)
            if delta is None:
                del streams[i]
            else:
                got[i] += delta.token_ids
    assert list(got.values()) == want[:3]
