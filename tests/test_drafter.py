"""The DFlash drafter against its definition, written out densely with no cache and no pages."""

import json
import math

import pytest
import torch
from fixtures import (
    TINY,
    TINY_MASK,
    PagedCache,
    make_drafter,
    make_target,
    tiny_drafter,
    tiny_target,
)
from safetensors.torch import load_file

from ddtree.config import load_target_config
from ddtree.kernels import get_ops
from ddtree.models.layers import ROPE_MARGIN
from ddtree.models.registry import build_drafter, build_target

CPU = torch.device("cpu")
OPS = get_ops("torch", CPU)
FULL, SLIDING = "full_attention", "sliding_attention"

FAMILIES = {
    "published": ({}, ["full", "full"], [None, None]),
    "sliding": (
        {"layer_types": [SLIDING, FULL], "sliding_window": 8},
        ["causal", "full"],
        [8, None],
    ),
    "all sliding": (
        {"layer_types": [SLIDING, SLIDING], "sliding_window": 5, "use_sliding_window": True},
        ["causal", "causal"],
        [5, 5],
    ),
    "sliding bidirectional": (
        {"layer_types": [FULL, SLIDING], "sliding_window": 11, "is_causal": False},
        ["full", "full"],
        [None, 11],
    ),
    "causal": ({"is_causal": True}, ["causal", "causal"], [None, None]),
    "causal head": ({"dflash_config": {"causal_head": True}}, ["causal", "causal"], [None, None]),
}
"""Config entries -> per layer: who is seen in the block, and the window."""


def dense_block(folder, kinds, windows, embeddings, features):
    """Hidden states `[L+1, H]` of a block behind `features [S, M*H]`, in float64.

    Query i of the block is at position S + i. It sees context key j at position j and block key
    i' at S + i', unless a causal layer or a window hides it.
    """
    config = json.loads((folder / "config.json").read_text())
    weights = {
        name.removeprefix("model."): tensor.double()
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    dim, eps = config["head_dim"], config["rms_norm_eps"]

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weights[f"{name}.weight"]

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T

    def rotate(x, positions):
        """x [tokens, heads, dim]; dimension i turns together with dimension i + dim / 2."""
        frequency = config["rope_theta"] ** (-torch.arange(0, dim, 2).double() / dim)
        angle = (positions[:, None].double() * frequency)[:, None]
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)

    context = norm(linear(features.double(), "fc"), "hidden_norm")
    size, start = len(embeddings), len(features)
    key_positions = torch.arange(start + size)
    query_positions = key_positions[start:]
    x = embeddings.double() * config["dflash_config"].get("input_embedding_scale", 1.0)
    for layer, (kind, window) in enumerate(zip(kinds, windows, strict=True)):
        name = f"layers.{layer}"
        hidden = norm(x, f"{name}.input_layernorm")
        both = torch.cat((context, hidden))
        q = linear(hidden, f"{name}.self_attn.q_proj").view(size, heads, dim)
        k = linear(both, f"{name}.self_attn.k_proj").view(-1, kv_heads, dim)
        v = linear(both, f"{name}.self_attn.v_proj").view(-1, kv_heads, dim)
        q = rotate(norm(q, f"{name}.self_attn.q_norm"), query_positions)
        k = rotate(norm(k, f"{name}.self_attn.k_norm"), key_positions)
        visible = torch.ones(size, start + size, dtype=torch.bool)
        if kind == "causal":
            visible &= key_positions <= query_positions[:, None]
        if window is not None:
            visible &= key_positions > query_positions[:, None] - window
        out = torch.empty(size, heads, dim, dtype=torch.float64)
        for head in range(heads):
            group = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, group].T / math.sqrt(dim)
            out[:, head] = scores.masked_fill(~visible, -math.inf).softmax(-1) @ v[:, group]
        x = x + linear(out.view(size, -1), f"{name}.self_attn.o_proj")
        hidden = norm(x, f"{name}.post_attention_layernorm")
        gate = torch.nn.functional.silu(linear(hidden, f"{name}.mlp.gate_proj"))
        x = x + linear(gate * linear(hidden, f"{name}.mlp.up_proj"), f"{name}.mlp.down_proj")
    return norm(x, "norm").float()


def build(folder, dtype=torch.float32):
    return build_drafter(folder, load_target_config(tiny_target()), OPS, CPU, dtype)


def random_features(batch, length, taps=3, seed=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, length, taps * 64, generator=generator) * 2


def random_block(batch, size, seed=6):
    return torch.randn(batch, size, 64, generator=torch.Generator().manual_seed(seed))


def write_context(model, cache, features, start=0, chunks=None):
    """Write rows `start ..` of the context, in chunks; the same start for every row."""
    for chunk in features.split(chunks or features.shape[1], dim=1):
        rows = (start + torch.arange(chunk.shape[1])).expand(len(chunk), -1)
        model.write_context(chunk, rows, cache.slots(rows), cache.kv)
        start += chunk.shape[1]


def draft(model, cache, embeddings, length):
    prefix = torch.full((len(embeddings),), length)
    state = cache.state(prefix, embeddings.shape[1], model.views)
    return model(embeddings, state, cache.kv)


@torch.inference_mode()
@pytest.mark.parametrize("length", [1, 7, 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_equal_the_definition(family, length):
    entries, kinds, windows = FAMILIES[family]
    folder = make_drafter(tiny_target(), **entries)
    model = build(folder)
    features, block = random_features(2, length), random_block(2, 6)
    cache = PagedCache(model.config, batch=2)
    write_context(model, cache, features)
    hidden = draft(model, cache, block, length)
    for row in range(2):
        expected = dense_block(folder, kinds, windows, block[row], features[row])
        torch.testing.assert_close(hidden[row], expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["published", "sliding"])
def test_later_rounds_see_the_grown_context(family):
    """Each round commits a few rows over slots that the block before has scribbled on."""
    entries, kinds, windows = FAMILIES[family]
    folder = make_drafter(tiny_target(), **entries)
    model = build(folder)
    features = random_features(1, 30)
    cache = PagedCache(model.config, batch=1)
    length = 0
    for round_, grown in enumerate((9, 1, 6, 3, 2, 6)):
        write_context(model, cache, features[:, length : length + grown], start=length)
        length += grown
        block = random_block(1, 6, seed=round_)
        hidden = draft(model, cache, block, length)
        expected = dense_block(folder, kinds, windows, block[0], features[0, :length])
        torch.testing.assert_close(hidden[0], expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_rows_of_different_lengths():
    folder = tiny_drafter()
    model = build(folder)
    lengths = torch.tensor([3, 17, 33])
    features, block = random_features(3, 33), random_block(3, 6)
    cache = PagedCache(model.config, batch=3, page_size=16)
    write_context(model, cache, features)
    state = cache.state(lengths, 6, model.views)
    hidden = model(block, state, cache.kv)
    for row, length in enumerate(lengths.tolist()):
        expected = dense_block(folder, ["full"] * 2, [None] * 2, block[row], features[row, :length])
        torch.testing.assert_close(hidden[row], expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("block_size", [2, 16])
def test_block_sizes_taps_scale_and_prefix(block_size, prefix):
    folder = make_drafter(
        tiny_target(),
        num_layers=3,
        block_size=block_size,
        taps=(2, 0),
        prefix=prefix,
        dflash_config={"input_embedding_scale": 2.5},
    )
    model = build(folder)
    assert model.config.depth == block_size - 1 and model.config.target_layer_ids == (2, 0)
    features, block = random_features(1, 12, taps=2), random_block(1, block_size)
    cache = PagedCache(model.config, batch=1)
    write_context(model, cache, features)
    hidden = draft(model, cache, block, 12)
    expected = dense_block(folder, ["full"] * 3, [None] * 3, block[0], features[0])
    torch.testing.assert_close(hidden[0], expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("chunks", [1, 4, 13])
def test_context_rows_do_not_depend_on_the_chunks(chunks):
    model = build(make_drafter(tiny_target(), layer_types=[SLIDING, FULL], sliding_window=8))
    features = random_features(2, 37)
    whole, parts = (PagedCache(model.config, batch=2) for _ in range(2))
    write_context(model, whole, features)
    write_context(model, parts, features, chunks=chunks)
    assert whole.kv.abs().sum() > 0
    torch.testing.assert_close(parts.kv, whole.kv, atol=1e-6, rtol=1e-6)


@torch.inference_mode()
@pytest.mark.parametrize("chunks", [1, 5, 16])
def test_chunked_prefill_of_the_target_gives_the_same_context_rows(chunks):
    """From tokens to context rows: the target's taps in chunks, then the drafter's K/V."""
    target = build_target(tiny_target("qwen3"), OPS, CPU, torch.float32)
    model = build_drafter(tiny_drafter("qwen3"), target.config, OPS, CPU, torch.float32)
    taps = model.config.target_layer_ids
    tokens = torch.randint(0, 98, (2, 33), generator=torch.Generator().manual_seed(8))
    caches = []
    for size in (33, chunks):
        target_cache, draft_cache = PagedCache(target.config, 2), PagedCache(model.config, 2)
        done = torch.zeros(2, dtype=torch.int64)
        for chunk in tokens.split(size, dim=1):
            state = target_cache.state(done, chunk.shape[1], target.views("causal"))
            _, features = target(chunk, state, target_cache.kv, taps)
            write_context(model, draft_cache, features, start=int(done[0]))
            done = done + chunk.shape[1]
        caches.append(draft_cache.kv)
    assert caches[0].abs().sum() > 0
    torch.testing.assert_close(caches[1], caches[0], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_bfloat16_checkpoint_runs_in_either_dtype():
    folder = make_drafter(tiny_target(), dtype=torch.bfloat16)
    features, block = random_features(1, 20), random_block(1, 6)
    expected = dense_block(folder, ["full"] * 2, [None] * 2, block[0], features[0])
    for dtype, error in ((torch.float32, 1e-4), (torch.bfloat16, 0.15)):
        model = build(folder, dtype)
        assert model.config.torch_dtype == "bfloat16"
        cache = PagedCache(model.config, batch=1, dtype=dtype)
        write_context(model, cache, features)
        hidden = draft(model, cache, block, 20)
        assert hidden.dtype == dtype
        torch.testing.assert_close(hidden[0].float(), expected, atol=error, rtol=error)


def test_views_are_the_distinct_ones_of_the_layers():
    folder = make_drafter(
        tiny_target(), num_layers=3, layer_types=[SLIDING, FULL, SLIDING], sliding_window=8
    )
    model = build(folder)
    assert model.config.layer_views == (("causal", 8), ("full", 0), ("causal", 8))
    assert model.views == (("causal", 8), ("full", 0))


@torch.inference_mode()
def test_the_block_uses_the_targets_embedding_and_head():
    """The drafter's own dtype differs from the target's; both ends convert."""
    target = build_target(make_target("llama", seed=3), OPS, CPU, torch.float32)
    model = build(tiny_drafter(), torch.bfloat16)
    cache = PagedCache(model.config, batch=1, dtype=torch.bfloat16)
    write_context(model, cache, random_features(1, 5))
    tokens = torch.tensor([[4] + [TINY_MASK] * 5])
    hidden = draft(model, cache, target.embed(tokens), 5)
    logits = target.logits(hidden[:, 1:])
    assert logits.shape == (1, 5, target.config.vocab_size) and logits.dtype == torch.float32


def test_rope_tables_cover_the_targets_context():
    """A drafter's own maximum may be smaller than the target's."""
    model = build(make_drafter(tiny_target(), max_position_embeddings=64))
    assert len(model.rope.cos) == TINY["max_position_embeddings"] + ROPE_MARGIN


def test_float16_is_refused():
    with pytest.raises(ValueError, match="dtype: a drafter runs in bfloat16 or float32"):
        build(tiny_drafter(), torch.float16)
