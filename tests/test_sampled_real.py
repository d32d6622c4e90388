"""Sampled output of the real pair is the oracle's, token for token, in all settings."""

import gc
import itertools

import pytest
from sampling_oracle import SampledAgreement, assert_logprobs
from stubs import check_engines, watch
from test_greedy_real import CHATS

from ddtree import Engine, SamplingParams

TOKENS = 64
PARAMS = (
    {"temperature": 0.3},
    {"temperature": 0.7},
    {"temperature": 1.0},
    {"temperature": 1.5},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
)
"""Chat i has entry i % 5, so that every configuration meets all of them."""
BUDGETS, BATCHES = (1, 7, 16, 64), (1, 3, 8)
MODES, PAGES, COUPLING = ("tree", "chain"), (1, 16), (True, False)
CONFIGS = [
    (
        budget,
        batch,
        MODES[(i + j) % 2],
        PAGES[(i // 2 + j) % 2],
        COUPLING[(i + i // 2 + j) % 2],
    )
    for i, budget in enumerate(BUDGETS)
    for j, batch in enumerate(BATCHES)
]
"""Every pair of values of two settings occurs in one of these 12."""
SHARE = 3
"""A configuration takes every third chat: 8 of 24."""


@pytest.fixture(autouse=True)
def pages_free():
    """Every test leaves every engine with all its pages."""
    yield
    check_engines()


@pytest.fixture(scope="module")
def agreement(demo_target):
    """Near-ties of the whole module, judged together."""
    agreement = SampledAgreement(demo_target)
    yield agreement
    agreement.close()


@pytest.fixture(scope="module")
def make_engine(demo_target, demo_drafter):
    """Engine(budget, batch, page size, coupling) of the demo pair; the one before is closed."""
    last = []

    def make(budget, batch, page_size, coupling):
        for engine in last:
            engine.close()
        last.clear()
        gc.collect()
        engine = Engine(
            str(demo_target),
            str(demo_drafter),
            budget=budget,
            max_batch_size=batch,
            page_size=page_size,
            coupling=coupling,
            max_model_len=256,
        )
        last.append(watch(engine))
        return engine

    yield make
    for engine in last:
        engine.close()


def chat(engine, chosen, count, mode, **options):
    """Outputs for the chats of these indices, each with parameters and seed of its own."""
    messages = [[{"role": "user", "content": CHATS[i]}] for i in chosen]
    params = [
        SamplingParams(
            max_new_tokens=count, speculation=mode, seed=100 + i, **PARAMS[i % 5], **options
        )
        for i in chosen
    ]
    return params, engine.chat(messages, params)


def check(agreement, params, outputs, label):
    for one, output in zip(params, outputs, strict=True):
        agreement.check(output.prompt_token_ids, one, output.seed, output.token_ids, label)


def test_the_configurations_cover_all_pairs():
    assert len(CONFIGS) <= 16 and len(CHATS) == 24
    values = (BUDGETS, BATCHES, MODES, PAGES, COUPLING)
    for one, two in itertools.combinations(range(5), 2):
        met = {(config[one], config[two]) for config in CONFIGS}
        assert met == set(itertools.product(values[one], values[two]))


def test_two_chats(agreement, make_engine, demo_target):
    """Plain, chain and coupled tree rounds in one engine, with logprobs."""
    engine = make_engine(7, 3, 4, True)
    same = []
    for mode in ("off", "chain", "tree"):
        params, outputs = chat(engine, (2, 4), 8, mode, logprobs=2)
        check(agreement, params, outputs, mode)
        same.append([output.token_ids for output in outputs])
        output = outputs[0]
        assert_logprobs(demo_target, output.prompt_token_ids, output.token_ids, output.logprobs, 2)
    assert same[0] == same[1] == same[2]


@pytest.fixture(scope="module")
def plain(agreement, make_engine):
    """Ids of every chat by plain decoding, all of them the oracle's."""
    params, outputs = chat(make_engine(0, 8, 16, True), range(len(CHATS)), TOKENS, "off")
    check(agreement, params, outputs, "off")
    assert sum(len(output.token_ids) for output in outputs) > 0.7 * TOKENS * len(CHATS)
    return [output.token_ids for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("index", range(len(CONFIGS)), ids=lambda i: "-".join(map(str, CONFIGS[i])))
def test_covering_array(agreement, make_engine, plain, index):
    """Each configuration's outputs are plain decoding's; near-ties apart, and those are checked."""
    budget, batch, mode, page_size, coupling = CONFIGS[index]
    engine = make_engine(budget, batch, page_size, coupling)
    chosen = range(index % SHARE, len(CHATS), SHARE)
    params, outputs = chat(engine, chosen, TOKENS, mode)
    before = len(agreement.ties)
    check(agreement, params, outputs, str(CONFIGS[index]))
    differ = sum(o.token_ids != plain[i] for i, o in zip(chosen, outputs, strict=True))
    assert differ <= len(agreement.ties) - before
    rounds = sum(output.stats.rounds for output in outputs)
    assert rounds < sum(len(output.token_ids) - 1 for output in outputs)


@pytest.mark.slow
def test_coupling_saves_rounds(make_engine):
    """The tree that sees the noise is accepted deeper than the one that does not."""
    rounds = []
    for coupling in (True, False):
        _, outputs = chat(make_engine(16, 8, 16, coupling), range(24), 48, "tree")
        rounds.append(sum(output.stats.rounds for output in outputs))
    assert rounds[0] < 0.97 * rounds[1], rounds
