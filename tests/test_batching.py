"""Continuous batching changes nothing: every request gets what it would get alone."""

import functools
import itertools
import random

import pytest
import torch
from fixtures import tiny_target
from stubs import FULL, PARTLY, Agreement, by_anchor, check_engines, install, tiny_engine

from ddtree import SamplingParams
from ddtree.runtime.request import FINISHED, RUNNING

REQUESTS = 64
DRAFTERS = {"oracle": FULL, "mixed": PARTLY, "bad": None}


@pytest.fixture(autouse=True)
def pages_free():
    """Every test leaves every engine with all its pages."""
    yield
    check_engines()


@functools.cache
def jobs(seed):
    """64 (prompt, params), and what each gives alone, decoded plainly."""
    rng = random.Random(seed)
    made = []
    engine = tiny_engine(draft=None, budget=0, max_batch_size=1, max_model_len=160)
    for _ in range(REQUESTS):
        prompt = [rng.randrange(98) for _ in range(rng.choice((1, 3, 9, 20, 50)))]
        count = rng.choice((1, 3, 30, 90))
        params = SamplingParams(max_new_tokens=count, ignore_eos=rng.random() < 0.5)
        (output,) = engine.generate(prompt, params)
        options = rng.choice(
            ({}, {"budget": 3}, {"budget": 5}, {"speculation": "chain"}, {"speculation": "off"})
        )
        stop = ()
        if len(output.token_ids) > 5 and rng.random() < 0.3:
            stop = (rng.choice(output.token_ids),)
            output.token_ids = output.token_ids[: output.token_ids.index(stop[0]) + 1]
            output.finish_reason = "stop"
        ignore = params.ignore_eos
        params = SamplingParams(
            max_new_tokens=count, ignore_eos=ignore, stop_token_ids=stop, **options
        )
        made.append((prompt, params, output))
    return made


@pytest.mark.parametrize("seed, drafter", enumerate(DRAFTERS))
def test_64_requests_are_as_if_alone(seed, drafter):
    """Random arrival, cancellation, preemption; batch 8 on a pool that is too small for 8."""
    rng = random.Random(100 + seed)
    engine = tiny_engine(
        budget=6, max_batch_size=8, max_model_len=160, page_size=4, num_pages=42, prefill_chunk=24
    )
    known = by_anchor((len(p), p + list(o.token_ids)) for p, _, o in jobs(seed))
    ranks = DRAFTERS[drafter]
    install(engine, known if ranks else None, ranks or FULL)
    agreement = Agreement()
    queue = [engine._request("prompt", prompt, params) for prompt, params, _ in jobs(seed)]
    order = rng.sample(range(REQUESTS), REQUESTS)
    arrived, cancelled, most = [], set(), 0
    while order or engine._running(queue[i] for i in arrived):
        while order and rng.random() < 0.8:
            arrived.append(order.pop())
            engine._submit([queue[arrived[-1]]])
        open_ = [i for i in arrived if queue[i].status != FINISHED]
        most = max(most, sum(queue[i].status == RUNNING for i in open_))
        if open_ and rng.random() < 0.025:
            victim = rng.choice(open_)
            cancelled.add(victim)
            engine._cancel([queue[victim]])
        if open_:
            engine._step([queue[i] for i in open_])
    preemptions = engine._loop.scheduler.preemptions
    print(f"{preemptions} preemptions, {len(cancelled)} cancelled, {most} at once")
    assert preemptions >= 2 and len(cancelled) >= 3 and most >= 5
    for i, (prompt, _, want) in enumerate(jobs(seed)):
        output, wanted = queue[i].result(), list(want.token_ids)
        if i in cancelled:
            assert output.finish_reason == "abort"
            wanted = wanted[: len(output.token_ids)]
        label = f"{drafter}, request {i}"
        agreement.check(tiny_target(), prompt, output.token_ids, wanted, label)
        if i not in cancelled and output.token_ids == wanted:
            assert output.finish_reason == want.finish_reason, label
    agreement.close()
    engine._cancel(queue)


def test_a_long_prompt_does_not_stall_the_others(monkeypatch):
    """Between its chunks, each within the bound, every running request has a round."""
    engine = tiny_engine(max_batch_size=3, max_model_len=300, prefill_chunk=16)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    prompts = [[5, 17, 60], [88, 4]]
    longest = torch.randint(0, 98, (200,), generator=torch.Generator().manual_seed(2)).tolist()
    alone = [engine.generate(p, params)[0].token_ids for p in (*prompts, longest)]
    running = [engine._request("prompt", p, params) for p in prompts]
    engine._submit(running)
    for _ in range(3):
        engine._step(running)
    plans, launch = [], engine._loop.runner.launch
    monkeypatch.setattr(
        engine._loop.runner, "launch", lambda plan: plans.append(plan) or launch(plan)
    )
    late = engine._request("prompt", longest, params)
    engine._submit([late])
    requests = [*running, late]
    counts = []
    while engine._running(requests):
        engine._step(requests)
        counts.append([len(r.output) for r in running])
    chunks = [i for i, plan in enumerate(plans) if plan.prefills]
    assert chunks == list(range(13)), "200 tokens are 13 chunks of at most 16"
    for i in chunks:
        assert sum(len(c.tokens) for c in plans[i].prefills) <= 16
        assert {row.request_id for row in plans[i].rows} == {r.id for r in running}
    for before, after in itertools.pairwise(counts[:13]):
        assert all(a < b for a, b in zip(before, after)), "a chunk went by without a token"
    assert [r.output for r in requests] == alone
