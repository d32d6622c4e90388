"""Greedy output is plain decoding's, whatever drafts it: token for token, over all settings."""

import functools
import itertools

import pytest
import torch
from fixtures import TINY_EOS, tiny_target
from stubs import (
    FULL,
    KNOWN,
    PARTLY,
    SIBLINGS,
    Agreement,
    cases,
    check_engines,
    install,
    known,
    tiny_engine,
)

from ddtree import SamplingParams

BUDGETS = (0, 1, 7, 16, 64)
PAGES = (1, 4, 16)
BATCHES = (1, 3, 8)
PROMPTS = {1: 2, 3: 4, 8: 9}
"""Prompts per batch size: more than fit at once, so that some join as others leave."""
DRAFTERS = {"oracle": (FULL, 14), "mixed": (PARTLY, 12), "bad": (None, 5)}
"""Draft ranks and new tokens: few where hardly any are accepted, for time's sake."""


@pytest.fixture(autouse=True)
def pages_free():
    """Every test leaves every engine with all its pages."""
    yield
    check_engines()


@pytest.fixture(scope="module")
def agreement():
    """Near-ties of the whole module, judged together."""
    agreement = Agreement()
    yield agreement
    agreement.close()


@functools.cache
def engine(architecture, budget, page_size, batch, prefill_chunk=2048):
    return tiny_engine(
        architecture,
        budget=budget,
        page_size=page_size,
        max_batch_size=batch,
        prefill_chunk=prefill_chunk,
    )


def draft(engine, architecture, drafter):
    ranks = DRAFTERS[drafter][0]
    install(engine, known(architecture) if ranks else None, ranks or FULL)


def compare(agreement, architecture, chosen, outputs, wants, label):
    """Every output agrees with its wanted tokens, and says truly why it ended."""
    folder = tiny_target(architecture)
    for case, output, want in zip(chosen, outputs, wants, strict=True):
        agreement.check(folder, case.prompt, output.token_ids, want, label)
        if output.token_ids == want:
            assert output.finish_reason == ("stop" if want[-1] in TINY_EOS else "length"), label


CELLS = [
    pytest.param(*cell, marks=pytest.mark.slow if cell[0] == "qwen3" and cell[1:] != (4, 3) else ())
    for cell in itertools.product(("llama", "qwen3"), PAGES, BATCHES)
]


@pytest.mark.parametrize("architecture, page_size, batch", CELLS)
def test_full_cross(agreement, architecture, page_size, batch):
    """Budgets x chain and tree x drafters, for every page size and batch size."""
    chosen = cases(architecture)[: PROMPTS[batch]]
    prompts = [c.prompt for c in chosen]
    where = f"{architecture} page {page_size} batch {batch}"
    plain = {}
    for drafter, (_, count) in DRAFTERS.items():
        params = SamplingParams(max_new_tokens=count, speculation="off")
        outputs = engine(architecture, 0, page_size, batch).generate(prompts, params)
        plain[drafter] = [output.token_ids for output in outputs]
        wants = [c.answer[:count] for c in chosen]
        compare(agreement, architecture, chosen, outputs, wants, f"{where} off")

    for budget, drafter in itertools.product(BUDGETS, DRAFTERS):
        tested = engine(architecture, budget, page_size, batch)
        draft(tested, architecture, drafter)
        for mode in ("chain", "tree"):
            label = f"{where} budget {budget} {mode} {drafter}"
            params = SamplingParams(max_new_tokens=DRAFTERS[drafter][1], speculation=mode)
            outputs = tested.generate(prompts, params)
            compare(agreement, architecture, chosen, outputs, plain[drafter], label)
            if drafter == "oracle":
                _assert_drafts_accepted(outputs, min(budget, 5) if mode == "tree" else 5, label)


def _assert_drafts_accepted(outputs, depth, label):
    """The cross means nothing unless drafts are accepted as deep as they can be."""
    for output in outputs:
        rounds = -(-(len(output.token_ids) - 1) // (depth + 1))
        assert output.stats.rounds == rounds, label


@pytest.mark.parametrize(
    "architecture, prefill_chunk", [("llama", 1), ("llama", 3), ("llama", 7), ("qwen3", 3)]
)
def test_chunked_prefill(agreement, architecture, prefill_chunk):
    """Prompts that take several steps to prefill, beside rows that decode already."""
    tested = engine(architecture, 16, 4, 3, prefill_chunk)
    chosen = cases(architecture)[:6]
    for drafter, (_, count) in DRAFTERS.items():
        draft(tested, architecture, drafter)
        outputs = tested.generate([c.prompt for c in chosen], SamplingParams(max_new_tokens=count))
        wants = [c.answer[:count] for c in chosen]
        compare(agreement, architecture, chosen, outputs, wants, f"chunk {prefill_chunk} {drafter}")
        if drafter == "oracle":
            _assert_drafts_accepted(outputs, 5, "context rows of chunked prompts")


@pytest.mark.parametrize(
    "architecture, drafter",
    [("llama", "oracle"), ("llama", "mixed"), ("llama", "bad"), ("qwen3", "mixed")],
)
def test_mixed_parameters_in_one_batch(agreement, architecture, drafter):
    """Tree, chain and plain rows, own budgets and lengths, in one batch."""
    tested = engine(architecture, 64, 4, 8)
    draft(tested, architecture, drafter)
    chosen = cases(architecture)
    kinds = [
        {"speculation": "off"},
        {"speculation": "chain"},
        {"budget": 0},
        {"budget": 1},
        {"budget": 3},
        {"budget": 16},
        {},
    ]
    for shift in range(3):
        limits = [1 + (5 * i + 7 * shift) % KNOWN for i in range(10)]
        params = [
            SamplingParams(max_new_tokens=n, **kinds[(i + shift) % len(kinds)])
            for i, n in enumerate(limits)
        ]
        outputs = tested.generate([c.prompt for c in chosen], params)
        wants = [c.answer[:n] for c, n in zip(chosen, limits, strict=True)]
        compare(agreement, architecture, chosen, outputs, wants, f"mixed {shift} {drafter}")


def test_siblings_are_accepted(agreement):
    """MIXED trees beat the chain of the same drafter: second choices are accepted."""
    tested = engine("llama", 16, 4, 3)
    install(tested, known("llama"), SIBLINGS)
    chosen = [c for c in cases("llama") if len(c.answer) == KNOWN][:3]
    prompts = [c.prompt for c in chosen]
    rounds = {}
    for mode in ("chain", "tree"):
        outputs = tested.generate(prompts, SamplingParams(max_new_tokens=25, speculation=mode))
        compare(agreement, "llama", chosen, outputs, [c.answer[:25] for c in chosen], mode)
        rounds[mode] = sum(output.stats.rounds for output in outputs)
    assert rounds["tree"] * 2 <= rounds["chain"]


def test_requests_join_and_leave(agreement):
    """Streams opened one by one share a batch of three, and each still gets its own answer."""
    tested = engine("llama", 7, 4, 3)
    draft(tested, "llama", "mixed")
    chosen = cases("llama")
    open_streams, answers = {}, {i: [] for i in range(len(chosen))}
    started = 0
    while started < len(chosen) or open_streams:
        if started < len(chosen):
            params = SamplingParams(max_new_tokens=5 + 2 * started)
            open_streams[started] = tested.stream(chosen[started].prompt, params)
            started += 1
        for index, stream in list(open_streams.items()):
            delta = next(stream, None)
            if delta is None:
                del open_streams[index]
            else:
                answers[index] += delta.token_ids
    for index, case in enumerate(chosen):
        want = case.answer[: 5 + 2 * index]
        agreement.check(tiny_target("llama"), case.prompt, answers[index], want, f"stream {index}")


SETTINGS = {
    "chunks of 3": {"prefill_chunk": 3},
    "pages of 1": {"page_size": 1},
    "pages of 16": {"page_size": 16},
    "alone": {"max_batch_size": 1},
    "preempted": {"page_size": 1, "num_pages": 82},
}


@functools.cache
def plain_drafts():
    return drafts()


def drafts(**options):
    """Per case and round: the sorted scores of the real (random) drafter's tree; preemptions."""
    tested = tiny_engine(**{"page_size": 4, "max_batch_size": 4, "budget": 7, **options})
    chosen = sorted(cases("llama"), key=lambda c: len(c.prompt))
    params = SamplingParams(max_new_tokens=30, trace=True)
    outputs = tested.generate([c.prompt for c in chosen], params)
    assert [o.token_ids for o in outputs] == [c.answer for c in chosen]
    scores = [torch.tensor([r.scores for r in output.trace]) for output in outputs]
    return scores, tested.describe()["preemptions"]


@pytest.mark.parametrize("setting", list(SETTINGS))
def test_the_drafter_sees_the_same_context(setting):
    """Its drafts depend on every context row, and on nothing else.

    Verification would hide a wrong row: the tokens stay right, only fewer drafts are accepted.
    """
    want, preemptions = plain_drafts()
    assert preemptions == 0
    got, preemptions = drafts(**SETTINGS[setting])
    assert (preemptions > 0) == (setting == "preempted")
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=0)
