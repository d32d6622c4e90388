"""The engine on Triton's kernels, in the interpreter: the torch ops' tokens."""

import pytest
from fixtures import tiny_drafter, tiny_target
from kernel_tools import interpreted
from stubs import FULL, SIBLINGS, cases, install, known

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


def check(architecture, budget, jobs, ranks=SIBLINGS):
    """Two engines that differ in their kernels alone, on the same jobs: (mode, parameters)."""
    found = {}
    for kernels in ("torch", "triton"):
        with engine(kernels, architecture, budget) as tested:
            install(tested, known(architecture), ranks)
            prompts = [case.prompt for case in cases(architecture)[: len(jobs)]]
            outputs = tested.generate(prompts, jobs)
            found[kernels] = [(o.token_ids, o.stats.rounds, o.finish_reason) for o in outputs]
    assert found["triton"] == found["torch"]
    return found["triton"]


@interpreted
def test_greedy():
    jobs = [SamplingParams(max_new_tokens=14, speculation=mode) for mode in ("tree", "chain")]
    found = check("llama", 8, jobs)
    for (tokens, rounds, _), case in zip(found, cases()):
        assert tokens == case.answer[:14] and rounds < 13


@pytest.mark.slow
@pytest.mark.parametrize("budget", [3, 16, 70])
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@interpreted
def test_greedy_widely(architecture, budget):
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
