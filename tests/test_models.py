"""Targets against transformers: logits, taps, every RoPE type, chunks, dtypes."""

import json
from dataclasses import replace

import pytest
import torch
from fixtures import TINY, PagedCache, edit_config, make_target, tiny_target
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ddtree.config import RopeConfig, load_target_config
from ddtree.kernels import get_ops
from ddtree.kernels.reference import NULL_PAGE, PACKED_ROWS_MAX, SPREAD_ROWS_MAX
from ddtree.models.layers import ROPE_MARGIN, rope_frequencies
from ddtree.models.registry import TARGETS, build_target
from ddtree.runtime.pages import RESERVED_PAGES

CPU = torch.device("cpu")
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn-mscale": {
        "rope_type": "yarn",
        "factor": 6.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 0.8,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "yarn-factor": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 256,
        "attention_factor": 1.3,
    },
}


def build(folder, dtype=torch.float32, **options):
    return build_target(folder, get_ops("torch", CPU), CPU, dtype, **options)


def run(model, tokens, chunks=None, taps=(), page_size=4):
    """Hidden states and features of `tokens [B, T]`, run in chunks over a paged cache."""
    cache = PagedCache(model.config, len(tokens), page_size=page_size, dtype=model.dtype)
    done = torch.zeros(len(tokens), dtype=torch.int64)
    hidden, features = [], []
    for chunk in tokens.split(chunks or tokens.shape[1], dim=1):
        state = cache.state(done, chunk.shape[1], model.views("causal"))
        out, tapped = model(chunk, state, cache.kv, taps)
        hidden.append(out)
        features.append(tapped)
        done = done + chunk.shape[1]
    return torch.cat(hidden, 1), torch.cat(features, 1) if taps else features[0]


def random_tokens(batch=2, length=21):
    return torch.randint(0, 98, (batch, length), generator=torch.Generator().manual_seed(3))


@torch.inference_mode()
def assert_same_logits(folder, tokens=None, **how):
    tokens = random_tokens() if tokens is None else tokens
    model = build(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    hidden, features = run(model, tokens, **how)
    logits = model.logits(hidden)
    assert logits.dtype == torch.float32 and features is None
    torch.testing.assert_close(logits, reference(tokens).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_equal_transformers(architecture, tied):
    assert_same_logits(make_target(architecture, tie_word_embeddings=tied))


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("shape", ["rope_parameters", "rope_scaling"])
@pytest.mark.parametrize("name", ROPES)
def test_logits_equal_transformers_for_every_rope(architecture, shape, name, tmp_path):
    folder = make_target(architecture, folder=tmp_path, num_hidden_layers=2)
    rope = ROPES[name]
    if shape == "rope_parameters":
        edit_config(folder, rope_parameters={**rope, "rope_theta": 5000.0})
    else:
        # Checkpoints older than the word "rope_type" say "type".
        old = {("type" if key == "rope_type" else key): value for key, value in rope.items()}
        edit_config(folder, rope_parameters=None)
        values = json.loads((folder / "config.json").read_text())
        values |= {"rope_theta": 5000.0, "rope_scaling": None if name == "default" else old}
        (folder / "config.json").write_text(json.dumps(values))
    config = load_target_config(folder)
    assert config.rope.type == rope["rope_type"] and config.rope.theta == 5000.0
    assert_same_logits(folder, random_tokens(1, 100))


@pytest.mark.parametrize("dim", [24, 64, 128])
@pytest.mark.parametrize("name", [name for name in ROPES if name != "default"])
def test_rope_frequencies_equal_transformers(name, dim, tmp_path):
    parameters = {**ROPES[name], "rope_theta": 500000.0}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **TINY}
    config |= {"head_dim": dim, "rope_parameters": parameters}
    (tmp_path / "config.json").write_text(json.dumps(config))
    make = ROPE_INIT_FUNCTIONS[ROPES[name]["rope_type"]]
    expected, scale = make(AutoConfig.from_pretrained(tmp_path), device=CPU)
    frequencies, ours = rope_frequencies(load_target_config(tmp_path).rope, dim)
    torch.testing.assert_close(frequencies, expected, atol=0, rtol=2e-6)
    assert ours == pytest.approx(scale)


def test_llama3_blends_between_the_two_wavelengths():
    """A frequency between the two bounds is neither kept nor divided by the whole factor."""
    rope = RopeConfig(type="llama3", theta=10000.0, factor=8.0, original_max_positions=64)
    plain, _ = rope_frequencies(replace(rope, type="default"), 64)
    scaled, _ = rope_frequencies(rope, 64)
    ratio = plain / scaled
    assert ratio[0] == 1 and ratio[-1] == pytest.approx(8)
    assert ((ratio > 1.01) & (ratio < 7.9)).any()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("chunks", [1, 5, 16])
def test_chunks_give_the_same_logits(chunks, page_size):
    assert_same_logits(tiny_target("qwen3"), chunks=chunks, page_size=page_size)


def test_biases_are_applied():
    assert_same_logits(make_target("llama", attention_bias=True, mlp_bias=True))
    assert_same_logits(make_target("qwen3", attention_bias=True))


def test_one_kv_head_per_head():
    assert_same_logits(make_target("llama", num_key_value_heads=8))


def test_a_tree_forward_sees_the_path_of_each_node():
    """Two branches behind a prefix: every node's logits are those of its own path."""
    model = build(tiny_target())
    reference = AutoModelForCausalLM.from_pretrained(tiny_target()).eval()
    prompt = random_tokens(1, 9)
    nodes = torch.tensor([[7, 11, 23, 42, 5]])
    parents, depths = [0, 0, 0, 1, 2], torch.tensor([[0, 1, 1, 2, 2]])
    words = torch.zeros(1, 5, 1, dtype=torch.int64)
    paths = []
    for node, parent in enumerate(parents):
        words[0, node, 0] = 1 << node | (words[0, parent, 0] if node else 0)
        paths.append([*(paths[parent] if node else []), int(nodes[0, node])])
    cache = PagedCache(model.config, 1)
    start = torch.zeros(1, dtype=torch.int64)
    with torch.inference_mode():
        model(prompt, cache.state(start, 9, model.views("causal")), cache.kv)
        state = cache.state(start + 9, 5, model.views("tree"), words, depths)
        logits = model.logits(model(nodes, state, cache.kv)[0])
        for node, path in enumerate(paths):
            plain = reference(torch.cat((prompt, torch.tensor([path])), 1)).logits[0, -1]
            torch.testing.assert_close(logits[0, node], plain, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("view", "count"),
    [
        (("causal", 0), 1),
        (("causal", 0), 5),
        (("causal", 3), 1),
        (("causal", 0), SPREAD_ROWS_MAX + 6),
        (("causal", 3), SPREAD_ROWS_MAX + 6),
        (("causal", 0), PACKED_ROWS_MAX + 6),
        (("full", 0), 6),
        (("full", 0), SPREAD_ROWS_MAX + 6),
        (("full", 4), 6),
        (("tree", 0), 7),
        (("tree", 0), SPREAD_ROWS_MAX + 6),
        (("tree", 0), PACKED_ROWS_MAX - 1),
    ],
)
@pytest.mark.parametrize("prefix", [0, 1, 10, 16])
@pytest.mark.parametrize("dims", [(6, 2, 16), (4, 4, 8)])
def test_attention_over_pages(view, count, prefix, dims):
    """Scattered pages, pages side by side and a batch equal dense float64 attention."""
    (kind, window), (heads, kv_heads, dim) = view, dims
    generator = torch.Generator().manual_seed(count + prefix)
    keys, page, pages = prefix + count, 4, 24
    q = torch.randn(1, count, heads, dim, generator=generator)
    kv = torch.randn(keys, 2, kv_heads, dim, generator=generator)
    words = None
    if kind == "tree":
        bits = [1]
        for node in range(1, count):
            bits.append(1 << node | bits[(node - 1) // 2])
        words = torch.tensor(bits).view(1, count, 1)
    own, query = torch.arange(keys) - prefix, torch.arange(count)[:, None]
    seen = own <= query if kind == "causal" else torch.ones(count, keys, dtype=torch.bool)
    if words is not None:
        seen = (own < 0) | (words[0] >> own.clamp_min(0) & 1).bool()
    if window:
        seen = seen & (own > query - window)
    k, v = kv.double().repeat_interleave(heads // kv_heads, dim=2).unbind(1)
    scores = torch.einsum("thd,shd->hts", q[0].double(), k) / dim**0.5
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    want = torch.einsum("hts,shd->thd", weights, v)

    ops = get_ops("torch", CPU)
    scattered = RESERVED_PAGES + torch.arange(2 * pages).flip(0).view(2, pages)
    side_by_side = torch.arange(7, 7 + pages)[None]
    at = torch.arange(keys)
    for table in (scattered[:1], side_by_side, scattered):
        pool = torch.full(((RESERVED_PAGES + 2 * pages) * page, 2, kv_heads, dim), torch.nan)
        pool[NULL_PAGE * page : (NULL_PAGE + 1) * page] = 0.0
        for row in table:  # The last row is looked at; one before it has the block alone.
            pool[row[at // page] * page + at % page] = kv
        lengths = torch.tensor([0, prefix])[-len(table) :]
        rows = None if words is None else words.expand(len(table), -1, -1)
        plan = ops.plan_attention(table, lengths, count, page, (view,), rows)
        single = len(table) == 1 and (table is side_by_side or keys <= page)
        assert (plan.index is None) == single
        layer = plan.narrow(pool[None], torch.zeros(1, 1))[0][0]
        queries = q.expand(len(table), -1, -1, -1)
        got = ops.attention(queries, layer, plan, view, dim**-0.5)[-1]
        torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=1e-5)


@torch.inference_mode()
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_taps_are_the_residual_stream_after_the_layer(architecture):
    folder = tiny_target(architecture)
    model, tokens = build(folder), random_tokens()
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = reference(tokens, output_hidden_states=True).hidden_states
    taps = (2, 0, 1)
    _, features = run(model, tokens, chunks=8, taps=taps)
    assert features.shape == (*tokens.shape, len(taps) * model.config.hidden_size)
    for tap, part in zip(taps, features.chunk(len(taps), dim=-1), strict=True):
        torch.testing.assert_close(part, expected[tap + 1], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_tap_of_the_last_layer_has_no_final_norm():
    model, tokens = build(tiny_target()), random_tokens()
    hidden, features = run(model, tokens, taps=(3,))
    torch.testing.assert_close(model.norm(features), hidden)
    assert not torch.allclose(features, hidden, atol=1e-2)


@torch.inference_mode()
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_bfloat16_is_as_exact_as_transformers(architecture):
    folder = make_target(architecture, dtype=torch.bfloat16)
    tokens = random_tokens(4, 40)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()(tokens).logits
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    model = build(folder, torch.bfloat16)
    assert model.config.torch_dtype == "bfloat16"
    logits = model.logits(run(model, tokens)[0])
    assert logits.dtype == torch.float32
    ours = (logits - exact).abs().mean()
    assert ours <= 1.5 * (theirs(tokens).logits - exact).abs().mean()


def test_rope_tables_cover_the_context_and_a_margin():
    model = build(tiny_target())
    assert len(model.rope.cos) == TINY["max_position_embeddings"] + ROPE_MARGIN
    assert len(build(tiny_target(), num_positions=40).rope.cos) == 40
    assert model.rope.cos.dtype == model.rope.sin.dtype == torch.float32


def test_embeddings_are_rows_of_the_table():
    model = build(tiny_target())
    reference = AutoModelForCausalLM.from_pretrained(tiny_target())
    tokens = random_tokens()
    expected = reference.get_input_embeddings()(tokens)
    torch.testing.assert_close(model.embed(tokens), expected.detach(), atol=0, rtol=0)


def test_registry_covers_the_architectures_of_the_configuration():
    from ddtree.config import DRAFT_ARCHITECTURES, TARGET_ARCHITECTURES
    from ddtree.models.registry import DRAFTERS

    assert list(TARGETS) == list(TARGET_ARCHITECTURES)
    assert list(DRAFTERS) == list(DRAFT_ARCHITECTURES)


def test_a_model_can_be_built_without_memory():
    """On the meta device every weight has its shape and no storage."""
    meta = torch.device("meta")
    model = build_target(tiny_target(), get_ops("torch", meta), meta, torch.float32)
    assert model.embedding.is_meta and model.layers[0].attention.qkv.weight.is_meta
    assert model.logits(torch.empty(2, 64, device=meta)).shape == (2, 101)
