"""Sampled output has the target's law: chi-square of three tokens against the exact one."""

import functools

import pytest
import torch
from fixtures import make_drafter, make_target
from safetensors.torch import load_file, save_file
from sampling_oracle import kept, raw_logits
from stubs import FULL, SIBLINGS, Stub
from test_rejection import chi_square_passes

from ddtree import SamplingParams
from ddtree.config import load_target_config
from ddtree.kernels import get_ops, sampling
from ddtree.models.registry import build_drafter, build_target
from ddtree.runtime.pages import RESERVED_PAGES
from ddtree.runtime.plan import DecodeSpec, Level
from ddtree.runtime.prefill import prefill_step
from ddtree.runtime.runner import Runner
from ddtree.runtime.stats import StageTimer
from ddtree.runtime.step import decode_step
from ddtree.state import FLOATS

CPU = torch.device("cpu")
V, TOKENS = 9, 3
PROMPT = [3, 1, 4, 1, 5]
ROWS, PAGE, PAGES = 500, 4, 6
FILTERS = {
    "all": {},
    "top-k": {"top_k": 4},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.15},
    "together": {"top_k": 6, "top_p": 0.9, "min_p": 0.05},
}
MODES = {
    "coupled": {},
    "plain": {"coupling": False},
    "rejection": {"rejection": True},
}


@pytest.fixture(autouse=True)
def small_digits(monkeypatch):
    """A threshold search in eight passes of 16 bins: 2048 bins are a waste for nine tokens."""
    monkeypatch.setattr(sampling, "RADIX", tuple((shift, 4) for shift in range(28, -1, -4)))


@functools.cache
def target():
    """A random target of nine tokens whose distributions are far from flat."""
    folder = make_target(
        vocab_size=V, eos=V - 1, eos_token_id=V - 1, bos_token_id=0, tie_word_embeddings=False
    )
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 2.5
    save_file(tensors, path, metadata={"format": "pt"})
    return folder


@functools.cache
def models():
    ops = get_ops("torch", CPU)
    built = build_target(target(), ops, CPU, torch.float32, progress=False)
    folder = make_drafter(target(), mask_token_id=V - 2)
    config = load_target_config(target())
    return built, build_drafter(folder, config, ops, CPU, torch.float32, progress=False), ops


@functools.cache
def logits():
    """The target's logits [V, V, 3, V] float64 after the prompt and up to two more tokens."""
    rows = [raw_logits(target(), PROMPT, [a, b, 0]) for a in range(V) for b in range(V)]
    return torch.stack(rows).view(V, V, TOKENS, V)


def exact_law(params):
    """Probabilities [V ** 3] of the three tokens."""

    def law(x):
        keep, _ = kept(x, params)
        return (x / params.temperature).masked_fill(~keep, -torch.inf).softmax(-1)

    joint = torch.zeros(V, V, V, dtype=torch.float64)
    first = law(logits()[0, 0, 0])
    for a in range(V):
        second = law(logits()[a, 0, 1])
        for b in range(V):
            joint[a, b] = first[a] * second[b] * law(logits()[a, b, 2])
    return joint.flatten()


def likely_next(row, position, token):
    """What the target would most likely say after the anchor; what is before it, it guesses."""
    first = [int(logits()[0, 0, 0].argmax())]
    if position > len(PROMPT) - 1:
        first = [token] if position == len(PROMPT) else [*first, token]
    while len(first) < TOKENS:
        at = len(first)
        second = first[1] if at == 2 else 0
        first.append(int(logits()[first[0], second, at].argmax()))
    return first[position - len(PROMPT) + 1 :]


def noisy_next(row, position, token):
    """As `likely_next`, wrong after half of the anchors."""
    return [(x + token % 2) % V for x in likely_next(row, position, token)]


DRAFTERS = {
    "oracle": (likely_next, FULL),
    "mixed": (likely_next, SIBLINGS),
    "noisy": (noisy_next, FULL),
    "bad": (None, FULL),
}


@torch.inference_mode()
def sample(mode, drafts, filters, count, nodes=8):
    """Counts [V ** 3] of the tokens of `count` rows, how many drafts were accepted, and the law.

    All rows share the prompt's page, and begin with the last token of the prompt as the anchor.
    """
    built, drafter, ops = models()
    lookup, ranks = DRAFTERS[drafts]
    shared, start = RESERVED_PAGES, len(PROMPT) - 1
    runner = Runner.build(
        built,
        Stub(built, drafter, lookup, ranks),
        ops,
        max_batch_size=ROWS,
        page_size=PAGE,
        num_pages=1 + ROWS * (PAGES - 1),
        table_width=PAGES,
        max_nodes=nodes,
        num_candidates=nodes - 1,
        device=CPU,
        **MODES[mode],
    )
    machine, rows, own = runner.machine, runner.rows, slice(0, ROWS)
    params = SamplingParams(temperature=0.9, **FILTERS[filters])
    rows.block_table[own, 0] = shared
    rows.block_table[own, 1:] = 1 + shared + torch.arange(ROWS * (PAGES - 1)).view(ROWS, -1)
    prefill_step(machine, rows, torch.tensor([0]), torch.tensor([PROMPT[:start]]), 0, PAGES, True)
    rows.limit[own] = len(PROMPT) + TOKENS
    rows.budget[own] = nodes - 1
    rows.top_k[own] = params.top_k
    for name in ("temperature", "top_p", "min_p"):
        rows.floats[own, FLOATS.index(name)] = getattr(params, name)
    level = Level.NOISE
    for name, flag in (("top_k", Level.TOP_K), ("top_p", Level.TOP_P), ("min_p", Level.MIN_P)):
        level |= flag if name in FILTERS[filters] else Level.GREEDY
    spec = DecodeSpec("tree", nodes, 6, level)
    drawn, rounds, timer = [], 0, StageTimer(True)
    for first in range(0, count, ROWS):
        rows.length[own] = start
        rows.anchor[own] = PROMPT[-1]
        rows.done[own] = 0
        rows.seed[own] = first + torch.arange(ROWS)
        tokens = [[] for _ in range(ROWS)]
        while not bool(rows.done[own].all()):
            rounds += int((rows.done[own] == 0).sum())
            report = decode_step(machine, rows, torch.arange(ROWS), PAGES, spec, timer)
            for row, values in enumerate(report.tolist()):
                tokens[row] += spec.layout.parse(values).emitted
        drawn.append(torch.tensor(tokens))
    x = torch.cat(drawn)
    cells = (x[:, 0] * V + x[:, 1]) * V + x[:, 2]
    accepted = TOKENS * len(x) - rounds
    return torch.bincount(cells, minlength=V**3).double(), accepted, exact_law(params)


@pytest.mark.parametrize(
    ("mode", "drafts", "filters"),
    [
        ("coupled", "mixed", "together"),
        ("plain", "oracle", "all"),
        ("rejection", "noisy", "top-p"),
    ],
)
def test_the_law_is_exact(mode, drafts, filters):
    counts, accepted, law = sample(mode, drafts, filters, 6000)
    assert chi_square_passes(counts, law)
    assert accepted > 600


@pytest.mark.slow
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("drafts", DRAFTERS)
@pytest.mark.parametrize("mode", MODES)
def test_the_law_is_exact_everywhere(mode, drafts, filters):
    counts, accepted, law = sample(mode, drafts, filters, 20000)
    assert chi_square_passes(counts, law)
    assert accepted > 1000 or drafts in ("noisy", "bad")


def test_other_laws_would_be_noticed():
    """The test has power: another temperature, and another filter, fail it."""
    counts, _, law = sample("coupled", "oracle", "all", 6000)
    assert chi_square_passes(counts, law)
    assert not chi_square_passes(counts, exact_law(SamplingParams(temperature=1.1)))
    assert not chi_square_passes(counts, exact_law(SamplingParams(temperature=0.9, min_p=0.05)))


@pytest.mark.parametrize("drafts", ["oracle", "mixed"])
def test_a_biased_walk_would_be_noticed(drafts, monkeypatch):
    """`min(1, p / q)` on a tree of the likeliest tokens fails the same test."""

    def likeliest(log_q, seeds, length, count):
        return log_q.topk(count, -1).indices

    monkeypatch.setattr("ddtree.runtime.rejection.sample_drafts", likeliest)
    counts, accepted, law = sample("rejection", drafts, "all", 6000)
    assert accepted > 400
    assert not chi_square_passes(counts, law)
