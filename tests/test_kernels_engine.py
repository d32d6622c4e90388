"""The engine on Triton's kernels, in the interpreter: the torch ops' tokens."""

import dataclasses
import random

import pytest
from fixtures import tiny_drafter, tiny_target
from kernel_tools import interpreted
from stubs import FULL, SIBLINGS, by_anchor, install

from ddtree import Engine, SamplingParams


def engine(kernels, architecture, budget):
    return Engine(
        str(tiny_target(architecture)),
        draft=str(tiny_drafter(architecture)),
        budget=budget,
        page_size=4,
        max_batch_size=2,
        prefill_chunk=16,
        kernels=kernels,
    )


def check(architecture, budget, jobs, ranks=SIBLINGS, longest=20):
    """Two engines that differ in their kernels alone, and in nothing they say.

    The drafter knows what plain decoding gives, so that paths are accepted and moved.
    """
    rng = random.Random(budget)
    prompts = [[rng.randrange(98) for _ in range(rng.randint(2, longest))] for _ in jobs]
    found = {}
    for kernels in ("torch", "triton"):
        with engine(kernels, architecture, budget) as tested:
            if kernels == "torch":
                off = [dataclasses.replace(job, speculation="off") for job in jobs]
                answers = [output.token_ids for output in tested.generate(prompts, off)]
                told = [(len(p), p + a) for p, a in zip(prompts, answers, strict=True)]
            install(tested, by_anchor(told), ranks)
            outputs = tested.generate(prompts, jobs)
            found[kernels] = [(o.token_ids, o.stats.rounds, o.finish_reason) for o in outputs]
    assert found["triton"] == found["torch"]
    assert [tokens for tokens, _, _ in found["triton"]] == answers
    return found["triton"]


@interpreted
def test_a_few_rounds():
    ((tokens, rounds, _),) = check("llama", 8, [SamplingParams(max_new_tokens=6)], longest=4)
    assert len(tokens) == 6 and rounds < 4


@pytest.mark.slow
@pytest.mark.parametrize("budget", [3, 16, 70])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@interpreted
def test_greedy(architecture, budget):
    modes = ("tree", "chain", "off", "tree", "tree")
    jobs = [SamplingParams(max_new_tokens=20, speculation=mode) for mode in modes]
    for ranks in (FULL, SIBLINGS):
        check(architecture, budget, jobs, ranks)


@pytest.mark.slow
@interpreted
def test_sampled():
    jobs = [
        SamplingParams(max_new_tokens=16, temperature=0.8, seed=4),
        SamplingParams(max_new_tokens=16, temperature=1.1, seed=5, top_k=20, speculation="chain"),
        SamplingParams(max_new_tokens=16, temperature=1.0, seed=6, top_p=0.9),
        SamplingParams(max_new_tokens=16, speculation="off"),
    ]
    check("llama", 16, jobs)
