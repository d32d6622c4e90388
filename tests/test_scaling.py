"""What ranks say to each other in a round follows from the models, and so does its time."""

import dataclasses
import functools
import json
import math
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import scaling  # noqa: E402
from scaling import LEVELS, META, MODES, Call, Chip, CountingRanks, Rank, round_spec  # noqa: E402

from ddtree.kernels import get_ops  # noqa: E402
from ddtree.models.dummy import DummyCheckpoint  # noqa: E402
from ddtree.models.layers import Linear  # noqa: E402
from ddtree.models.llama import Llama  # noqa: E402
from ddtree.runtime import sampler  # noqa: E402

BATCH, BUDGET, CONTEXT = 3, 7, 40
NODES, BLOCK, PATH = BUDGET + 1, 6, 6
LAYERS, DRAFT_LAYERS, HIDDEN, INNER, VOCAB = 4, 2, 64, 96, 101
HEADS, KV_HEADS, DIM = 8, 2, 24
DRAFT_HEADS, DRAFT_KV_HEADS, DRAFT_DIM, DRAFT_INNER = 4, 2, 16, 80
BF16, INT64 = 2, 8
TOP_K = TOP_P = 3
"""Passes of a radix selection, each with the histogram of all ranks."""
SHARE = 1
"""The mass that top-p takes its share of."""


def tiny_configs():
    """The shapes of TINY and its drafter."""
    target, draft = scaling.shapes(False)
    common = {"hidden_size": HIDDEN, "max_position_embeddings": 512}
    target = dataclasses.replace(
        target,
        **common,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        intermediate_size=INNER,
        vocab_size=VOCAB,
        qk_norm=False,
    )
    draft = dataclasses.replace(
        draft,
        **common,
        num_layers=DRAFT_LAYERS,
        num_heads=DRAFT_HEADS,
        num_kv_heads=DRAFT_KV_HEADS,
        head_dim=DRAFT_DIM,
        intermediate_size=DRAFT_INNER,
        block_size=BLOCK,
        mask_token_id=VOCAB - 1,
        target_layer_ids=(0, 1, 3),
    )
    return target, draft


@functools.cache
def tiny_rank(size, rank, kernels):
    return Rank.build(*tiny_configs(), size, rank, kernels, Llama)


@functools.cache
def run(size, rank=0, mode="tree", level="greedy", kernels="triton"):
    """The collectives and the work of a round of TINY."""
    one = tiny_rank(size, rank, kernels)
    one.run(round_spec(mode, level, BUDGET, BLOCK), BATCH, BUDGET, CONTEXT)
    return list(one.ranks.calls), list(one.work)


def counts(calls):
    return [sum(call.kind == kind for call in calls) for kind in scaling.KINDS]


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_greedy_tree_round(size, kernels):
    """Two all-reduces per layer, one per embedding and for the drafter's fc, and nothing else."""
    calls, _ = run(size, 0, "tree", "greedy", kernels)

    def summed(rows):
        return Call("sum", BATCH * rows * HIDDEN * BF16, (BATCH, rows, HIDDEN))

    widest = -(-VOCAB // size)
    candidates = (BATCH, PATH - 1, 2 * min(BUDGET, widest) + 1)
    assert calls == [
        *[summed(BLOCK)] * (1 + 2 * DRAFT_LAYERS),
        Call("gather", math.prod(candidates) * INT64, candidates),
        *[summed(NODES)] * (1 + 2 * LAYERS),
        Call("max", BATCH * NODES * INT64, calls[-2].shape),
        summed(PATH),
    ]


DRAFTED = 1 + 2 * DRAFT_LAYERS + 1
"""Embedding of the block, its layers, and the fc of what is committed."""
VERIFIED = 1 + 2 * LAYERS
ROUNDS = {
    ("off", "greedy"): [VERIFIED, 1, 0],
    ("off", "noise"): [VERIFIED, 1, 0],
    ("off", "full"): [VERIFIED + TOP_K + SHARE + TOP_P, 2, 0],
    ("off", "full, logprobs"): [VERIFIED + TOP_K + SHARE + TOP_P, 2, 1],
    ("chain", "greedy"): [DRAFTED + VERIFIED, 2, 0],
    ("tree", "noise"): [DRAFTED + VERIFIED, 1, 1],
    ("tree", "full"): [DRAFTED + VERIFIED + TOP_K + SHARE + TOP_P, 2, 1],
    ("tree", "full, logprobs"): [DRAFTED + VERIFIED + TOP_K + SHARE + TOP_P, 2, 2],
}


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("mode, level", ROUNDS)
def test_rounds_by_mode_and_level(mode, level, kernels):
    calls, _ = run(2, 0, mode, level, kernels)
    assert counts(calls) == ROUNDS[mode, level]


def test_one_rank_says_nothing():
    for mode in MODES:
        assert run(1, 0, mode, "full, logprobs")[0] == []


@pytest.mark.parametrize("mode, level", [("chain", "noise"), ("tree", "full, logprobs")])
@pytest.mark.parametrize("size, kernels", [(2, "torch"), (4, "triton")])
def test_all_ranks_say_the_same(size, kernels, mode, level):
    """Though of 101 tokens some have one more than others."""
    said = [run(size, rank, mode, level, kernels)[0] for rank in range(size)]
    assert said[0] and all(one == said[0] for one in said)


def test_choices_are_cut_alike_on_all_ranks(monkeypatch):
    """By the widest part, of 51 tokens: 24 nodes in blocks of 9, and one choice for them all."""
    monkeypatch.setattr(sampler, "CHUNK_LOGITS", 10 * 51 - 1)
    monkeypatch.setattr(sampler, "CPU_BLOCK_LOGITS", 10 * 51 - 1)
    for rank in range(2):
        calls, _ = run.__wrapped__(2, rank)
        assert [math.prod(call.shape) for call in calls if call.kind == "max"] == [24]
        calls, _ = run.__wrapped__(2, rank, "tree", "full")
        cut = [math.prod(call.shape) for call in calls if call.kind == "max"]
        assert len(cut) > 2 and sum(cut[:-1]) == cut[-1] == 24 and max(cut[:-1]) <= 9


def test_candidates_are_as_many_on_all_ranks():
    """60 of all ranks' tokens, of which one has 50 and one 51."""
    for rank in range(2):
        one = tiny_rank(2, rank, "triton")
        one.run(round_spec("tree", "greedy", 60, BLOCK), 1, 60, CONTEXT)
        (gathered,) = (call for call in one.ranks.calls if call.kind == "gather")
        assert gathered.shape == (1, BLOCK - 1, 2 * 51 + 1)


@pytest.mark.parametrize("divided", ["columns", "rows"])
def test_a_linear_makes_one_all_reduce_or_none(divided):
    ranks = CountingRanks(1, 2)
    ops = get_ops("torch", META)
    inner = ranks.part(INNER)
    sizes = (inner, {"w": HIDDEN}) if divided == "columns" else (HIDDEN, {"w": inner})
    linear = Linear(ops, *sizes, parallel=ranks)
    linear.load(DummyCheckpoint(ops, META, torch.bfloat16))
    out = linear(torch.empty(3, 5, linear.in_features.size, dtype=torch.bfloat16, device=META))
    wanted = [Call("sum", 3 * 5 * HIDDEN * BF16, (3, 5, HIDDEN))] if divided == "columns" else []
    assert ranks.calls == wanted
    assert out.shape == (3, 5, HIDDEN if divided == "columns" else inner.size)


# -- what a rank holds, reads and computes ---------------------------------------------------------

TARGET_NORMS = (2 * LAYERS + 1) * HIDDEN
DRAFT_NORMS = 2 * HIDDEN + DRAFT_LAYERS * (2 * HIDDEN + 2 * DRAFT_DIM) + DRAFT_LAYERS * DRAFT_DIM
"""The keys' norms of the context rows are a copy."""
TARGET_KV = LAYERS * 2 * KV_HEADS * DIM * HIDDEN
DRAFT_KV = 2 * DRAFT_LAYERS * 2 * DRAFT_KV_HEADS * DRAFT_DIM * HIDDEN
"""Twice, for the block and for context rows."""
TARGET_LAYERS = LAYERS * HIDDEN * (2 * HEADS * DIM + 3 * INNER) + TARGET_KV
DRAFT_BLOCK = DRAFT_LAYERS * HIDDEN * (2 * DRAFT_HEADS * DRAFT_DIM + 3 * DRAFT_INNER)
FC = 3 * HIDDEN * HIDDEN
TABLE = VOCAB * HIDDEN
DIVIDED = TARGET_LAYERS + DRAFT_BLOCK + DRAFT_KV + FC + 2 * TABLE


def test_weights_are_divided_but_for_norms_and_shared_heads():
    norms = TARGET_NORMS + DRAFT_NORMS
    assert tiny_rank(1, 0, "triton").weight_bytes == BF16 * (DIVIDED + norms)
    for size, shared in ((2, 0), (4, TARGET_KV + DRAFT_KV)):
        held = sum(tiny_rank(size, rank, "triton").weight_bytes for rank in range(size))
        assert held == BF16 * (DIVIDED + shared + size * norms), size


def kv_bytes(batch=BATCH):
    target = LAYERS * KV_HEADS * DIM * (CONTEXT + NODES)
    draft = DRAFT_LAYERS * DRAFT_KV_HEADS * DRAFT_DIM * (CONTEXT + BLOCK)
    return 2 * BF16 * batch * (target + draft)


def test_a_round_reads_its_weights_once_and_the_head_twice():
    """The embedding is looked up, not read; norms are not counted."""
    assert sum(one.bytes for one in run(1)[1]) == BF16 * DIVIDED + kv_bytes()
    for size, shared in ((2, 0), (4, BF16 * (TARGET_KV + DRAFT_KV) + kv_bytes())):
        read = sum(one.bytes for rank in range(size) for one in run(size, rank)[1])
        assert read == BF16 * DIVIDED + kv_bytes() + shared, size


def test_operations_are_divided():
    attention = 4 * BATCH * LAYERS * HEADS * DIM * NODES * (CONTEXT + NODES)
    attention += 4 * BATCH * DRAFT_LAYERS * DRAFT_HEADS * DRAFT_DIM * BLOCK * (CONTEXT + BLOCK)
    weights = NODES * (TARGET_LAYERS + TABLE) + (PATH - 1) * TABLE
    weights += BLOCK * (DRAFT_BLOCK + DRAFT_KV // 2) + PATH * (FC + DRAFT_KV // 2)
    wanted = attention + 2 * BATCH * weights
    for size in (1, 2):
        done = [sum(one.flops for one in run(size, rank)[1]) for rank in range(size)]
        assert sum(done) == wanted, size


# -- the prediction --------------------------------------------------------------------------------


def test_bytes_sent_in_a_ring():
    for size, reduced, gathered in ((2, 1.0, 1), (4, 1.5, 3), (8, 1.75, 7)):
        assert Call("sum", 1000, ()).sent(size) == Call("max", 1000, ()).sent(size)
        assert Call("sum", 1000, ()).sent(size) == 1000 * reduced
        assert Call("gather", 1000, ()).sent(size) == 1000 * gathered


def test_a_prediction_adds_up():
    calls, work = run.__wrapped__(2)
    rank = tiny_rank(2, 0, "triton")
    free = math.inf
    read, flops = sum(one.bytes for one in work), sum(one.flops for one in work)
    reads = scaling.predict(rank, Chip(1e8, free, free), 0.0)
    assert reads["round_ms"] == pytest.approx(1e3 * read / 1e8, abs=1e-4)
    computes = scaling.predict(rank, Chip(free, 1e9, free), 0.0)
    assert computes["round_ms"] == pytest.approx(1e3 * flops / 1e9, abs=1e-4)
    both = scaling.predict(rank, Chip(1e8, 1e9, free), 0.0)
    least = max(reads["round_ms"], computes["round_ms"])
    assert least <= both["round_ms"] <= reads["round_ms"] + computes["round_ms"]
    sent = sum(call.bytes for call in calls)
    talks = scaling.predict(rank, Chip(free, free, 1e7), 1e-3)
    assert talks["collective_ms"] == pytest.approx(len(calls) + 1e3 * sent / 1e7, abs=1e-4)
    assert talks["work_ms"] == 0 and talks["round_ms"] == talks["collective_ms"]


def test_the_script_writes_all_rows(tmp_path, monkeypatch, capsys):
    output = tmp_path / "new" / "scaling.json"
    options = ["--small", "--tp", "1", "2", "--budgets", "3", "17"]
    options += ["--batches", "1", "5", "--context", "100", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["scaling.py", *options])
    scaling.main()
    found = json.loads(output.read_text())
    settings = [(row["tp"], row["budget"], row["batch"]) for row in found["rows"]]
    assert settings == [(tp, n, b) for tp in (1, 2) for n in (3, 17) for b in (1, 5)]
    # 3 layers, drafter 2: the same all-reduces whatever the tree and the batch.
    sums = [row["collectives"]["sum"]["calls"] for row in found["rows"]]
    assert sums == [0] * 4 + [1 + 2 * 2 + 1 + 2 * 3 + 1] * 4
    assert len(found["levels"]) == len(MODES) * len(LEVELS)
    assert {row["tp"] for row in found["levels"]} == {2}
    assert found["measured"] is False and set(found["weight_bytes"]) == {"1", "2"}
    printed = capsys.readouterr().out
    assert scaling.table(found["rows"]) in printed
    assert scaling.level_table(found["levels"]) in printed


def test_the_page_shows_what_the_code_does():
    """The committed numbers are this code's, and the page's tables are those numbers."""
    found = json.loads((ROOT / "benchmarks/results/scaling.json").read_text())
    page = (ROOT / "docs/scaling.md").read_text()
    assert scaling.table(found["rows"]) in page and scaling.level_table(found["levels"]) in page
    rank = Rank.build(*scaling.shapes(True), 8, 7, "torch")
    rank.run(round_spec("tree", "greedy", 63, 16), 8, 63, found["context"])
    setting = {"tp": 8, "budget": 63, "batch": 8}
    row = setting | scaling.describe(rank, 1e-6 * found["latency_us"])
    assert row in found["rows"] and found["weight_bytes"]["8"] == rank.weight_bytes
