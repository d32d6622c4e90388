"""The engine on Triton's kernels, in the interpreter: the torch ops' tokens."""

import contextlib
import dataclasses
import random

import pytest
from fixtures import make_drafter, tiny_drafter, tiny_target
from kernel_tools import interpreted
from stubs import FULL, SIBLINGS, by_anchor, install

from ddtree import Engine, SamplingParams
from ddtree.runtime import round_sampler, sampler, step, vocabulary

TORCH_WAYS = (
    (step, "build_tree"),
    (vocabulary, "rank_candidates"),
    (round_sampler, "scaled_noise"),
    (sampler, "filter_logits"),
    (sampler, "perturb_nodes"),
)


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


@contextlib.contextmanager
def only(kernels):
    """Under "triton", the torch way to make trees, candidates and noise breaks."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in TORCH_WAYS if kernels == "triton" else ():
            patch.setattr(module, name, None)
        yield


def check(architecture, budget, jobs, ranks=SIBLINGS, longest=20):
    """Two engines that differ in their kernels alone, and in nothing they say.

    The drafter knows what plain decoding gives, so that paths are accepted and moved.
    """
    rng = random.Random(budget)
    prompts = [[rng.randrange(98) for _ in range(rng.randint(2, longest))] for _ in jobs]
    found = {}
    for kernels in ("torch", "triton"):
        with engine(kernels, architecture, budget) as tested, only(kernels):
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


@interpreted
def test_a_few_rounds_of_a_drafter_of_some_tokens():
    """A tree of more nodes than it knows tokens."""
    draft = str(make_drafter(tiny_target(), draft_tokens=[7, 20, 50]))
    jobs = [
        SamplingParams(max_new_tokens=3, trace=True),
        SamplingParams(max_new_tokens=3, trace=True, temperature=0.9, seed=3),
    ]
    found = []
    for kernels in ("torch", "triton"):
        with (
            Engine(str(tiny_target()), draft, budget=5, page_size=4, kernels=kernels) as tested,
            only(kernels),
        ):
            outputs = tested.generate([[5, 6], [9, 8]], jobs)
        found.append([(o.token_ids, [r.tokens for r in o.trace]) for o in outputs])
    assert found[0] == found[1]
    assert {t for _, rounds in found[1] for r in rounds for t in r[1:]} <= {7, 20, 50}


@interpreted
def test_a_few_sampled_rounds():
    filters = {"top_k": 40, "top_p": 0.95, "min_p": 0.01}
    jobs = [
        SamplingParams(max_new_tokens=5, temperature=0.9, seed=3),
        SamplingParams(max_new_tokens=5, temperature=1.2, seed=4, speculation="chain", **filters),
    ]
    check("llama", 5, jobs, longest=4)


@interpreted
def test_the_engine_tells_what_serves_attention():
    with engine("triton", "llama", 4) as tested:
        tested.generate([1, 2, 3], SamplingParams(max_new_tokens=2))
        told = tested.describe()
    assert told["kernels"] == told["attention"] == "triton"
    assert told["causal attention"].startswith("triton (")


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture, budget, ranks",
    [("llama", 3, FULL), ("qwen3", 3, SIBLINGS), ("qwen3", 16, FULL)],
)
@interpreted
def test_greedy(architecture, budget, ranks):
    modes = ("tree", "chain", "off", "tree")
    jobs = [SamplingParams(max_new_tokens=12, speculation=mode) for mode in modes]
    check(architecture, budget, jobs, ranks)


@pytest.mark.slow
@interpreted
def test_greedy_with_two_words_of_ancestors():
    check("llama", 70, [SamplingParams(max_new_tokens=6)], SIBLINGS, longest=4)


@pytest.mark.slow
@interpreted
def test_sampled():
    jobs = [
        SamplingParams(max_new_tokens=12, temperature=0.8, seed=4, frequency_penalty=0.5),
        SamplingParams(max_new_tokens=12, temperature=1.1, seed=5, top_k=20, speculation="chain"),
        SamplingParams(max_new_tokens=12, temperature=1.0, seed=6, top_p=0.9, budget=5),
        SamplingParams(max_new_tokens=12, speculation="off"),
    ]
    check("qwen3", 16, jobs)
