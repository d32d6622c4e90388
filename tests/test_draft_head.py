"""The int8 head that drafts are made with on CPU: near the real one, and row by row."""

from unittest import mock

import pytest
import torch
from fixtures import TINY_EOS, edit_config, make_drafter, make_target, tiny_target
from safetensors.torch import load_file, save_file
from stubs import cases, check_engines, watch

from ddtree import Engine, SamplingParams
from ddtree.kernels import draft_head, get_ops, reference
from ddtree.kernels.draft_head import DraftHead, make_draft_head
from ddtree.models.registry import build_target
from ddtree.parallel import SINGLE
from ddtree.runtime.vocabulary import Vocabulary

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


# -- drafters that know a part of the vocabulary ---------------------------------------------------

SOME = [3, 4, 7, 8, 20, 33, 34, 50, 60, 61, 77, 80, 97, 99]
"""Of TINY's 101 tokens."""


def generate_all(engine, **params):
    """Greedy and sampled outputs in every mode; and the tokens of all nodes but the anchors."""
    prompts = [case.prompt for case in cases()[:3]]
    found, nodes = [], set()
    for sampled in (
        {},
        {"temperature": 0.9, "seed": 2},
        {"temperature": 1.0, "seed": 5, "top_p": 0.9},
    ):
        for mode in ("off", "chain", "tree"):
            outputs = engine.generate(
                prompts,
                SamplingParams(
                    max_new_tokens=16, speculation=mode, trace=mode != "off", **sampled, **params
                ),
            )
            found.append([output.token_ids for output in outputs])
            rounds = [r for output in outputs for r in output.trace or ()]
            nodes |= {token for r in rounds for token in r.tokens[1:]}
    return found, nodes


@pytest.mark.parametrize("least", [1, 1 << 40], ids=["int8", "own"])
@pytest.mark.parametrize("tied", [True, False])
def test_only_known_tokens_are_drafted(tied, least, monkeypatch):
    monkeypatch.setattr(reference, "LEAST_WEIGHTS", least)
    folder = make_target(tie_word_embeddings=tied)
    shuffled = SOME[::-1]
    engine = watch(Engine(str(folder), str(make_drafter(folder, draft_tokens=shuffled)), budget=9))
    about = engine.describe()
    assert about["draft_vocab_size"] == len(SOME)
    assert about["draft_head"] == ("int8" if least == 1 else "target's")
    found, nodes = generate_all(engine)
    assert nodes == set(SOME)
    whole = watch(Engine(str(folder), str(make_drafter(folder)), budget=9))
    assert whole.describe()["draft_vocab_size"] is None
    want, everything = generate_all(whole)
    assert found == want and len(everything) > len(SOME)
    check_engines()


def test_rejection_with_some_tokens():
    draft = str(make_drafter(tiny_target(), draft_tokens=SOME))
    with Engine(str(tiny_target()), draft, budget=9, verify="rejection") as engine:
        (one, *_), nodes = generate_all(engine)
        assert nodes == set(SOME)
        assert all(len(answer) == 16 or answer[-1] in TINY_EOS for answer in one)


def test_the_logits_of_known_tokens_are_the_head_s(monkeypatch):
    """In their order, whatever the order of the table; and a tree larger than they are."""
    monkeypatch.setattr(reference, "LEAST_WEIGHTS", 1 << 40)
    draft = str(make_drafter(tiny_target(), draft_tokens=[50, 7, 20], prefix="model."))
    engine = watch(Engine(str(tiny_target()), draft, budget=16))
    target = engine._target
    x = torch.randn(2, 5, 64)
    assert target.draft_tokens.tolist() == [7, 20, 50]
    torch.testing.assert_close(target.draft_logits(x), target.logits(x)[..., [7, 20, 50]])
    found, nodes = generate_all(engine)
    assert nodes == {7, 20, 50} and found[0] == found[1] == found[2]
    check_engines()


@pytest.mark.parametrize("order", [None, 1, -1])
def test_a_table_of_all_tokens_says_nothing(order):
    """And without one, the whole vocabulary's number is as good as none."""
    tokens = None if order is None else list(range(101))[::order]
    draft = make_drafter(tiny_target(), draft_tokens=tokens)
    edit_config(draft, draft_vocab_size=101)
    with Engine(str(tiny_target()), str(draft)) as engine:
        assert engine._target.draft_tokens is None and engine.describe()["draft_vocab_size"] == 101


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_other_dtypes_are_float32(dtype):
    ops = get_ops("torch", CPU)
    target = build_target(
        tiny_target(), ops, CPU, dtype, drafts=True, draft_tokens=torch.tensor(SOME)
    )
    x = torch.randn(3, 64)
    found = target.draft_logits(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, target.logits(x)[:, SOME], rtol=0.02, atol=0.02)


def test_the_int8_logits_of_known_tokens_are_near(monkeypatch):
    monkeypatch.setattr(reference, "LEAST_WEIGHTS", 1)
    ops, some = get_ops("torch", CPU), torch.tensor(SOME)
    target = build_target(tiny_target(), ops, CPU, torch.float32, drafts=True, draft_tokens=some)
    x = hidden(40, 2)[..., :64]
    found, exact = target.draft_logits(x), target.logits(x)[..., SOME]
    assert isinstance(target.draft_head, DraftHead)
    assert (found - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("alpha", [None, 0.6])
def test_known_tokens_are_ranked_as_in_the_whole_vocabulary(alpha):
    """What is chosen among the few is what is chosen among all with the others out of reach."""
    target = mock.Mock(draft_tokens=torch.tensor(SOME), parallel=SINGLE, vocab=SINGLE.part(101))
    alone = Vocabulary(target, get_ops("torch", CPU))
    whole = Vocabulary(target, mock.Mock(fused=True))
    generator = torch.Generator().manual_seed(4)
    logits, noise = (torch.randn(2, 3, n, generator=generator) for n in (len(SOME), 101))
    assert whole.narrow(noise) is None
    tokens, few = alone.narrow(noise)
    spread = alone.spread(logits)
    assert torch.equal(spread[..., SOME], logits)
    assert (spread < -1e29).sum() == 2 * 3 * (101 - len(SOME))
    ids, weights = alone.top_candidates(logits, 5)
    want = alone.top_candidates(spread, 5)
    assert torch.equal(tokens[ids], want[0])
    torch.testing.assert_close(weights, want[1])
    heat = torch.tensor([0.7, 0.0])
    trust = None if alpha is None else torch.tensor([alpha, 1.0, 2.0])
    coupling = (heat, 5) if trust is None else (heat, 5, few, trust, trust)
    ids, weights = alone.rank_candidates(logits, *coupling)
    coupling = (heat, 5) if trust is None else (heat, 5, noise, trust, trust)
    want = alone.rank_candidates(spread, *coupling)
    assert torch.equal(tokens[ids], want[0])
    torch.testing.assert_close(weights, want[1])


@pytest.mark.parametrize(
    "tokens,size,match",
    [
        ([5, 6], 3, r"tensor d2t has shape \[2\], expected \[3\]"),
        ([5, 101], 2, r"d2t .* 2 different tokens of the target's vocabulary, 0\.\.100"),
        ([-1, 4], 2, "d2t .* 2 different tokens"),
        ([5, 5], 2, "d2t .* 2 different tokens"),
        (None, 2, "tensor d2t is missing"),
        ([5, 6], None, "has a tensor d2t, but its config.json does not say draft_vocab_size"),
        ([0, *range(100)], 101, "d2t .* 101 different tokens"),
    ],
)
def test_tables_that_are_refused(tokens, size, match):
    draft = make_drafter(tiny_target(), draft_tokens=tokens)
    edit_config(draft, draft_vocab_size=size)
    with pytest.raises(ValueError, match=match):
        Engine(str(tiny_target()), str(draft))


def test_a_table_of_numbers_that_are_no_integers_is_refused():
    draft = make_drafter(tiny_target())
    weights = load_file(draft / "model.safetensors")
    save_file(weights | {"d2t": torch.zeros(2)}, draft / "model.safetensors")
    edit_config(draft, draft_vocab_size=2)
    with pytest.raises(ValueError, match="d2t is stored as F32; only I32, I64 are supported"):
        Engine(str(tiny_target()), str(draft))


def test_the_mask_of_the_table_is_not_needed():
    """EAGLE-3's checkpoints say which tokens are known twice."""
    draft = make_drafter(tiny_target(), draft_tokens=SOME)
    weights = load_file(draft / "model.safetensors")
    known = torch.zeros(101, dtype=torch.bool).index_fill_(0, torch.tensor(SOME), True)
    save_file(weights | {"t2d": known}, draft / "model.safetensors")
    with Engine(str(tiny_target()), str(draft)) as engine:
        assert engine.describe()["draft_vocab_size"] == len(SOME)
