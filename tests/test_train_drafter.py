"""The drafter trainer's parts: data, features, the training forward, the loss, the proxy."""

from __future__ import annotations

import json
import math

import fixtures
import numpy as np
import pytest
import torch
from train_drafter import batches, data, evaluate, features, prompts
from train_drafter.drafter import TrainableDrafter
from train_drafter.layout import load_weights, new_config, read_config, save_drafter
from train_drafter.loss import SampledHead, block_loss
from train_drafter.target import load_target_weights

from ddtree.config import load_draft_config, load_target_config
from ddtree.kernels import get_ops
from ddtree.models.registry import build_drafter, build_target

CPU = torch.device("cpu")
TAPS = fixtures.TINY_TAPS


def ops():
    return get_ops("torch", CPU)


def trainable(draft, target) -> TrainableDrafter:
    model = TrainableDrafter(load_draft_config(draft, load_target_config(target)), 256)
    with torch.no_grad():
        load_weights(model, draft)
    return model


def random_sequences(count: int, seed: int = 0, length: int = 40) -> list[data.Sequence]:
    rng = np.random.default_rng(seed)
    return [
        data.Sequence(rng.integers(3, 98, length + int(rng.integers(0, 9))), 6, float(i % 2))
        for i in range(count)
    ]


# -- the forward ------------------------------------------------------------------------------


def test_dropout_is_for_training_only():
    target, draft = fixtures.tiny_target(), fixtures.tiny_drafter()
    plain = trainable(draft, target)
    model = TrainableDrafter(plain.config, 256, dropout=0.3)
    model.load_state_dict(plain.state_dict())
    torch.manual_seed(0)
    embeddings = torch.randn(1, 3, plain.config.block_size, 64)
    positions = torch.tensor([4, 9, 15])[:, None] + torch.arange(plain.config.block_size)
    given = embeddings, torch.randn(1, 20, len(TAPS) * 64), positions[None]
    with torch.no_grad():
        assert not torch.equal(model(*given), model(*given))
        for context, layers in ((0.3, 0.0), (0.0, 0.3)):
            model.dropout = context
            for layer in model.layers:
                layer.dropout = layers
            assert not torch.equal(model(*given), model(*given))
        assert torch.equal(model.eval()(*given), plain(*given))


@pytest.mark.parametrize(
    "layout",
    [
        {},
        {"is_causal": True},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7},
        {"input_embedding_scale": 2.5, "attention_bias": False, "num_key_value_heads": 4},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0}},
    ],
    ids=["full", "causal", "sliding", "scaled", "rope"],
)
def test_training_forward_equals_the_engines_drafter(layout):
    target = fixtures.tiny_target()
    draft = fixtures.make_drafter(target, **layout)
    model = trainable(draft, target)
    engine = build_drafter(draft, load_target_config(target), ops(), CPU, torch.float32)
    config = engine.config
    torch.manual_seed(0)
    length, anchors = 37, torch.tensor([0, 1, 5, 16, 30, 36])
    taps = torch.randn(2, length, len(TAPS) * 64)
    embeddings = torch.randn(2, len(anchors), config.block_size, 64)
    positions = (anchors[:, None] + torch.arange(config.block_size)).expand(2, -1, -1)
    with torch.no_grad():
        ours = model(embeddings, taps, positions)
    for i, anchor in enumerate(anchors.tolist()):
        cache = fixtures.PagedCache(config, 2, capacity=64)
        rows = torch.arange(anchor).expand(2, anchor)
        with torch.no_grad():
            if anchor:
                engine.write_context(taps[:, :anchor], rows, cache.slots(rows), cache.kv)
            prefix = torch.full((2,), anchor)
            state = cache.state(prefix, config.block_size, engine.views)
            theirs = engine(embeddings[:, i], state, cache.kv)
        assert (ours[:, i] - theirs).abs().max() < 1e-4


def test_reach_hides_all_but_the_nearest_context_rows():
    target = fixtures.tiny_target()
    model = trainable(fixtures.tiny_drafter(), target)
    torch.manual_seed(1)
    taps = torch.randn(1, 30, len(TAPS) * 64)
    embeddings = torch.randn(1, 1, 6, 64)
    positions = (20 + torch.arange(6)).view(1, 1, 6)
    far, near = taps.clone(), taps.clone()
    far[:, :16] += 1.0
    near[:, 16] += 1.0
    with torch.no_grad():
        base = model(embeddings, taps, positions, reach=4)
        assert torch.equal(base, model(embeddings, far, positions, reach=4))
        assert not torch.allclose(base, model(embeddings, near, positions, reach=4), atol=1e-3)
        assert not torch.allclose(base, model(embeddings, far, positions), atol=1e-3)


def test_gradients_flow_only_to_the_drafter():
    target = fixtures.tiny_target()
    model = trainable(fixtures.tiny_drafter(), target)
    weights = load_target_weights(target)
    embedding = weights.embedding.clone().requires_grad_()
    head_weight = weights.head.clone().requires_grad_()
    items = [
        batches.Item(s, torch.randn(len(s.tokens), 4 * 64).bfloat16(), 64)
        for s in random_sequences(2)
    ]
    anchors = [torch.tensor([7, 20]), torch.tensor([9])]
    batch = batches.make_batch(items, anchors, 6, fixtures.TINY_MASK, torch.ones(5))
    batch.teacher.requires_grad_()
    head = SampledHead(head_weight, torch.ones(101), 20, 30)
    with torch.no_grad():
        embedded = embedding[batch.blocks]
    hidden = model(embedded, batch.features, batch.positions)[:, :, 1:]
    loss = block_loss(
        hidden.flatten(0, 2),
        batch.teacher.flatten(0, 2),
        batch.labels.flatten(),
        batch.weights.flatten(),
        torch.full((batch.labels.numel(),), 0.5),
        head,
        torch.Generator().manual_seed(0),
    )
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
    assert embedding.grad is None and head_weight.grad is None and batch.teacher.grad is None


def test_blocks_carry_the_right_labels_and_teachers():
    sequence = data.Sequence(np.arange(10, 30), 6, 0.0)
    rows = torch.arange(20.0)[:, None].expand(20, 4).bfloat16().contiguous()
    anchors = [torch.tensor([6, 17])]
    weights = torch.tensor([4.0, 2.0, 1.0])
    batch = batches.make_batch([batches.Item(sequence, rows, 1)], anchors, 4, 99, weights)
    assert batch.blocks.tolist() == [[[16, 99, 99, 99], [27, 99, 99, 99]]]
    assert batch.positions.tolist() == [[[6, 7, 8, 9], [17, 18, 19, 20]]]
    assert batch.labels[0, 0].tolist() == [17, 18, 19]
    assert batch.labels[0, 1, :2].tolist() == [28, 29]
    # the state at the token before a label is the one that chose it
    assert batch.teacher[0, 0, :, 0].tolist() == [6, 7, 8]
    assert batch.weights[0].tolist() == [[4.0, 2.0, 1.0], [4.0, 2.0, 0.0]]


# -- the loss ---------------------------------------------------------------------------------


def rows_of(count: int = 12, size: int = 8, vocab: int = 60):
    torch.manual_seed(3)
    hidden, teacher = torch.randn(count, size), torch.randn(count, size)
    return hidden, teacher, torch.randint(0, vocab, (count,)), torch.randn(vocab, size)


def test_loss_over_the_whole_vocabulary_is_plain_cross_entropy():
    hidden, teacher, labels, weight = rows_of()
    weights = torch.rand(12)
    weights[3] = 0.0
    share = torch.linspace(0, 1, 12)
    head = SampledHead(weight, torch.arange(60), common=5, negatives=60)
    loss = block_loss(hidden, teacher, labels, weights, share, head, torch.Generator())
    log_q = torch.log_softmax(hidden @ weight.t(), -1)
    p = torch.softmax(teacher @ weight.t(), -1)
    hard = -log_q[torch.arange(12), labels]
    soft = -(p * log_q).sum(-1)
    expected = ((1 - share) * hard + share * soft) * weights
    assert torch.allclose(loss, expected.sum() / weights.sum(), atol=1e-5)


def test_sampled_partition_function_is_unbiased():
    hidden, _, labels, weight = rows_of()
    head = SampledHead(weight, torch.arange(60), common=6, negatives=15)
    exact = (hidden @ weight.t()).exp().sum(-1)
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(12)
    for _ in range(2000):
        candidates, correction, index = head.draw(labels, generator)
        assert torch.equal(candidates[index], weight[labels])
        total += (hidden @ candidates.t() + correction).exp().sum(-1)
    assert torch.allclose(total / 2000, exact, rtol=0.05)


# -- the data ---------------------------------------------------------------------------------


def test_loops_are_cut_and_duplicates_dropped():
    clean = np.arange(200)
    assert len(data.cut_loop(clean)) == 200
    loop = np.concatenate([np.arange(50), np.tile(np.arange(60, 70), 12)])
    cut = data.cut_loop(loop, ngram=8, allowed=4)
    assert np.array_equal(cut, loop[: len(cut)]) and 50 + 40 <= len(cut) < 50 + 50
    keep = data.Filter()
    prompt = np.array([1, 2])
    first = keep(data.Sequence(np.concatenate([prompt, clean]), 2, 0.0))
    assert first is not None and len(first.answer) == 200
    assert keep(data.Sequence(np.concatenate([prompt + 1, clean]), 2, 0.0)) is None
    assert keep(data.Sequence(np.concatenate([prompt, clean[:5]]), 2, 0.0)) is None
    assert keep.counts["duplicates"] == 1 and keep.counts["too short"] == 1
    fresh = data.Filter()
    fresh.remember([first])
    assert fresh(data.Sequence(np.concatenate([prompt, clean]), 2, 0.0)) is None


def test_split_is_by_prompt_and_about_as_large_as_it_says():
    rng = np.random.default_rng(0)
    found = [data.is_heldout(rng.integers(0, 50000, 30)) for _ in range(8000)]
    assert abs(np.mean(found) * 1000 - data.HELDOUT_PERMILLE) < 6
    prompt = rng.integers(0, 50000, 30)
    assert data.is_heldout(prompt) == data.is_heldout(prompt.astype(np.int32))


def test_import_splits_a_corpus_without_losing_any(tmp_path):
    everything = random_sequences(300)
    data.write_shard(tmp_path / "all.npz", everything)
    counts = data.import_corpus(tmp_path / "all.npz", tmp_path / "work", "all", shard_tokens=2000)
    shards = dict(data.readable_shards(tmp_path / "work"))
    assert len(shards) == counts["shards"] > 3
    key = lambda s: (s.start, s.temperature, *s.tokens.tolist())  # noqa: E731
    found = sorted(key(s) for sequences in shards.values() for s in sequences)
    assert found == sorted(map(key, everything))
    assert all(data.is_heldout(s.prompt) for s in shards["all-0000"])
    assert not any(data.is_heldout(s.prompt) for s in shards["all-0001"])


def make_shards(work, names, target_mark=7, taps=TAPS, hidden=64):
    for number, name in enumerate(names):
        sequences = random_sequences(8, seed=number)
        data.write_shard(work / "corpus" / f"{name}.npz", sequences)
        rows = torch.randn(sum(len(s.tokens) for s in sequences), (len(taps) + 1) * hidden)
        path, mark = work / "features" / f"{name}.bin", data.tokens_mark(sequences)
        features.write_features(path, rows.bfloat16(), taps, target_mark, mark)


@pytest.mark.parametrize("damage", ["features", "truncated", "corpus", "description"])
def test_a_corrupted_shard_is_named_and_skipped(tmp_path, damage):
    make_shards(tmp_path, ["a", "b", "c"])
    path = tmp_path / "features" / "b.bin"
    if damage == "description":
        path.with_suffix(".json").write_text('{"rows": ')
    else:
        if damage == "corpus":
            path = tmp_path / "corpus" / "b.npz"
        content = bytearray(path.read_bytes())
        if damage == "truncated":
            content = content[:-100]
        else:
            content[len(content) // 4] ^= 0x10  # a zip's headers are not checked, its data is
        path.write_bytes(content)
    said = []
    store = batches.Store(tmp_path, TAPS, 7, said.append)
    assert store.refresh() == ["a", "c"]
    assert len(said) == 1 and str(path.parent / "b.") in said[0] and "damaged" in said[0]
    store.refresh()
    assert len(said) == 1


@pytest.mark.parametrize("mark, taps", [(8, TAPS), (7, (0, 1, 2))])
def test_features_of_another_target_or_other_taps_are_refused(tmp_path, mark, taps):
    make_shards(tmp_path, ["a"])
    said = []
    store = batches.Store(tmp_path, taps, mark, said.append)
    assert store.refresh() == []
    assert "another target or with other taps" in said[0] and "a.bin" in said[0]


def test_a_drafter_of_another_target_or_shape_is_refused(tmp_path):
    target = fixtures.tiny_target()
    other = fixtures.make_target(hidden_size=32)
    with pytest.raises(ValueError, match="hidden_size 64 differs"):
        read_config(fixtures.tiny_drafter(), other)
    narrow = fixtures.make_drafter(target)
    fixtures.edit_config(narrow, intermediate_size=72)
    with pytest.raises(ValueError, match=r"layers.0.mlp.down_proj.weight .* \[64, 80\]"):
        trainable(narrow, target)
    deep = fixtures.make_drafter(target)
    fixtures.edit_config(deep, num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"lacks layers\.2"):
        trainable(deep, target)


def test_features_equal_the_hidden_states_of_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    target = fixtures.tiny_target("qwen3")
    sequences = [s.tokens for s in random_sequences(5)]
    model = build_target(target, ops(), CPU, torch.float32, progress=False)
    rows = features.compute_features(model, sequences, TAPS, rows=100).float()
    reference = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).model
    at = 0
    for tokens in sequences:
        with torch.no_grad():
            out = reference(torch.from_numpy(tokens)[None], output_hidden_states=True)
        # hidden_states[-1] is normed there, so the last layer's residual stream has no oracle here
        for slot, tap in enumerate(TAPS[:-1]):
            mine = rows[at : at + len(tokens), slot * 64 : (slot + 1) * 64]
            assert torch.allclose(mine, out.hidden_states[tap + 1][0], rtol=1e-2, atol=1e-2)
        final = rows[at : at + len(tokens), -64:]
        assert torch.allclose(final, out.last_hidden_state[0], rtol=1e-2, atol=1e-2)
        at += len(tokens)
    assert at == len(rows)


# -- layouts, prompts, reports ----------------------------------------------------------------


def test_a_new_layout_is_one_that_the_engine_loads(tmp_path):
    target = fixtures.tiny_target()
    config = new_config(target, layers=3, block_size=9, taps=[0, 2], mask_token=98)
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_config(tmp_path, target)
    model = TrainableDrafter(shape, 64)
    save_drafter(tmp_path, config, model.state_dict())
    loaded = build_drafter(tmp_path, load_target_config(target), ops(), CPU, torch.float32)
    assert loaded.config.block_size == 9 and loaded.config.target_layer_ids == (0, 2)
    assert math.isclose(loaded.config.rope.theta, load_target_config(target).rope.theta)


def test_evaluation_prompts_are_many_and_no_composed_prompt_resembles_one():
    found = prompts.read_prompts(evaluate.PROMPTS)
    assert len(found) == len(set(found)) >= 40
    composed = prompts.compose(4000)
    assert len(set(composed)) == 4000
    assert max(prompts.overlap(prompt, composed) for prompt in found)[0] < 0.5
    assert prompts.overlap("What is gravity, then?", composed)[0] > 0.5


def test_bootstrap_interval_holds_the_ratio_and_shrinks_with_more_prompts():
    rng = np.random.default_rng(1)
    rounds = rng.integers(40, 90, 400).tolist()
    tokens = [127] * 400
    few = evaluate.Score(tokens[:20], rounds[:20], 0)
    many = evaluate.Score(tokens, rounds, 0)
    assert many.per_round == pytest.approx(127 * 400 / sum(rounds))
    widths = []
    for score in (few, many):
        low, high = score.interval()
        assert low < score.per_round < high
        widths.append(high - low)
    assert widths[1] < widths[0] / 2
