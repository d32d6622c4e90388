"""The int8 head that drafts are made with on CPU: near the real one, and row by row."""

from unittest import mock

import pytest
import torch
from fixtures import make_drafter, make_target
from stubs import cases, check_engines, watch

from ddtree import Engine, SamplingParams
from ddtree.kernels import draft_head, get_ops, reference
from ddtree.kernels.draft_head import DraftHead, make_draft_head

CPU = torch.device("cpu")
VOCAB, HIDDEN = 3000, 96


@pytest.fixture(scope="module")
def weight():
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(0)) * 0.1


@pytest.fixture(scope="module")
def head(weight):
    return make_draft_head(weight)


def hidden(*shape, seed=1):
    return 3 * torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed))


def test_logits_are_near(head, weight):
    x = hidden(40, 5)
    found, exact = head(x), x @ weight.T
    assert found.shape == exact.shape and found.dtype == torch.float32
    assert (found - exact).norm() < 0.02 * exact.norm()
    assert (found.argmax(-1) == exact.argmax(-1)).float().mean() > 0.85


def test_a_row_does_not_depend_on_those_beside_it(head):
    """Small ones beside large ones, and beside NaN, in batches of every size."""
    rows = torch.cat((hidden(3), 1e-3 * hidden(3, seed=2), 1e3 * hidden(3, seed=3)))
    alone = torch.cat([head(row[None]) for row in rows])
    assert torch.equal(head(rows), alone)
    assert torch.equal(head(rows.view(3, 3, HIDDEN)).view(9, VOCAB), alone)
    poisoned = rows.clone()
    poisoned[4] = torch.nan
    kept = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(head(poisoned)[kept], alone[kept])
    assert head(torch.zeros(2, HIDDEN)).abs().max() == 0


def test_where_torch_cannot_the_target_s_head_drafts(weight, monkeypatch):
    def missing(*_):
        raise RuntimeError("no such engine")

    monkeypatch.setattr(torch.ops.quantized, "linear_prepack", missing, raising=False)
    assert make_draft_head(weight) is None
    engine = torch.backends.quantized.engine
    with pytest.raises(RuntimeError):
        DraftHead(weight)
    assert torch.backends.quantized.engine == engine


def test_a_wrong_product_is_noticed(weight, monkeypatch):
    call = DraftHead.__call__
    monkeypatch.setattr(DraftHead, "__call__", lambda self, x: 1.5 * call(self, x))
    assert make_draft_head(weight) is None


def test_small_heads_and_other_devices_have_none(weight):
    ops = get_ops("torch", CPU)
    read = mock.Mock(return_value=weight)
    assert ops.draft_head(read, VOCAB * HIDDEN) is None and not read.called
    assert isinstance(ops.draft_head(read, draft_head.LEAST_WEIGHTS), DraftHead)
    other = get_ops("torch", torch.device("meta"))
    assert other.draft_head(read, draft_head.LEAST_WEIGHTS) is None


@pytest.mark.parametrize("tied", [True, False])
def test_outputs_are_the_target_s(tied, monkeypatch):
    """Only drafts are made with it: greedy and sampled, in every mode, the tokens are the same."""
    monkeypatch.setattr(reference, "LEAST_WEIGHTS", 1)
    folder = make_target(tie_word_embeddings=tied)
    engine = watch(Engine(str(folder), str(make_drafter(folder)), budget=16))
    assert engine.describe()["draft_head"] == "int8"
    prompts = [case.prompt for case in cases()[:3]]
    for sampled in ({}, {"temperature": 1.0, "seed": 2}):
        found = [
            [o.token_ids for o in engine.generate(prompts, params)]
            for params in (
                SamplingParams(max_new_tokens=20, speculation=mode, **sampled)
                for mode in ("off", "chain", "tree")
            )
        ]
        assert found[0] == found[1] == found[2]
    drafts = engine._target.draft_head
    with mock.patch.object(engine._target, "draft_head", mock.Mock(side_effect=drafts)) as used:
        engine.generate(prompts[0], SamplingParams(max_new_tokens=8, speculation="off"))
        assert not used.called
        engine.generate(prompts[0], SamplingParams(max_new_tokens=8))
        assert used.called
    check_engines()


def test_without_a_drafter_there_is_none(monkeypatch):
    monkeypatch.setattr(reference, "LEAST_WEIGHTS", 1)
    engine = watch(Engine(str(make_target()), max_batch_size=2))
    assert engine.describe()["draft_head"] is None and engine._target.draft_head is None
    monkeypatch.undo()
    folder = make_target()
    drafted = watch(Engine(str(folder), str(make_drafter(folder)), max_batch_size=2))
    assert drafted.describe()["draft_head"] == "target's"
