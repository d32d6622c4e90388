"""Choosing a kernel set; flash-attn's part in it; the engine on Triton's kernels."""

import math
import sys
import types

import pytest
import torch
from kernel_tools import interpreted
from test_kernels_attention import CAUSAL, Case, make, oracle
from test_sampler import Target, params, random_logits, random_rows, sampling

from ddtree.kernels import flash, get_ops
from ddtree.kernels.paged_plan import PagedPlan
from ddtree.kernels.sampling import Filters
from ddtree.runtime import sampler
from ddtree.runtime.sampler import Sampling, choose_nodes, scaled_noise
from ddtree.runtime.vocabulary import Vocabulary

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_the_choice_of_a_set(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert get_ops("auto", CPU).name == get_ops("torch", CPU).name == "torch"
    assert get_ops("triton", torch.device("meta")).name == "triton"
    for name in ("triton", "fast"):
        with pytest.raises(ValueError, match=r"^kernels: "):
            get_ops(name, CPU)


def test_without_triton_there_is_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr("ddtree.kernels.find_spec", lambda name: None)
    assert get_ops("auto", CUDA).name == "torch"
    with pytest.raises(ValueError, match=r"^kernels: .* not installed"):
        get_ops("triton", CUDA)


@interpreted
def test_the_set_serves_attention_and_stores():
    case = Case(CAUSAL, (21, 3), 4, (4, 2), 64, 4)
    q, kv, table, prefix, _, slots = make(case)
    ops = get_ops("triton", CPU)
    assert not ops.packer.libraries and not ops.reads_whole_tables
    plan = ops.plan_attention(table, prefix, 4, 4, (CAUSAL,))
    assert plan.views == (CAUSAL,)
    own = torch.tensor([mine[-4:] for mine in slots])
    fresh = torch.randn(2, 4, 2, 2, 64)
    ops.write_kv(kv, own, fresh)
    assert torch.equal(kv[own], fresh)
    out = ops.attention(q, kv, plan, CAUSAL, 64**-0.5)
    for row, truth in enumerate(oracle(case, q, kv, None, slots)):
        torch.testing.assert_close(out[row].double(), truth, atol=2e-6, rtol=0)
    ops.move_kv(kv[None], own[0], own[1])
    assert torch.equal(kv[own[1]], fresh[0])
    assert ops.describe() == {
        "attention": "triton",
        "causal attention": "triton (flash-attn needs a GPU)",
    }


@pytest.mark.parametrize("norm", [True, False])
@interpreted
def test_one_launch_does_what_the_torch_set_does_in_several(norm):
    layers, batch, tokens, heads, kv_heads, dim = 3, 2, 5, 4, 2, 16
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    slots = torch.randperm(40, generator=generator)[: batch * tokens].view(batch, tokens)
    cos, sin = randn(2, batch, tokens, 1, dim)
    q_weight, k_weights = randn(dim), randn(layers, dim)
    weights = (q_weight, k_weights[1]) if norm else (None, None)
    new = randn(batch, tokens, heads + 2 * kv_heads, dim)
    made = randn(batch, tokens, layers, 2, kv_heads, dim)
    x, residual, scale = randn(3, batch, tokens, 24)
    found = []
    for ops in (get_ops("torch", CPU), get_ops("triton", CPU)):
        kv = torch.zeros(layers, 40, 2, kv_heads, dim)
        q = ops.rotate_and_write(new.clone(), cos, sin, *weights, 1e-5, slots, kv[1])
        context = torch.zeros_like(kv)
        rows = made.clone().permute(2, 0, 1, 3, 4, 5)
        ops.write_context(rows, cos, sin, k_weights, 1e-5, slots, context)
        sums = ops.add_rms_norm(x, residual, scale[0, 0], 1e-5)
        found.append((q, kv, context, *sums))
        assert not kv[0].any() and kv[1, slots].all() and context[:, slots].all()
    assert torch.equal(found[0][3], x + residual)
    torch.testing.assert_close(found[1], found[0], atol=2e-6, rtol=2e-6)


@interpreted
def test_nodes_choose_alike_with_seeds_and_with_noise():
    """Every row another mix of parameters, as columns of the device rows; and only the filters."""
    generator = torch.Generator().manual_seed(21)
    vocab, batch, nodes = 40, 4, 3
    logits = random_logits((batch, nodes, vocab), generator, coarse=False)
    paths = torch.randint(-1, vocab, (batch, nodes, 3), generator=generator)
    depths, length = (paths >= 0).sum(2), torch.arange(batch) + 8
    plain = params(temperature=1.5)
    everything = sampling([plain, *random_rows(batch - 2, vocab, generator), plain], vocab)
    heat, top_p, min_p = torch.stack(
        [getattr(everything.filters, name) for name in ("temperature", "top_p", "min_p")], 1
    ).unbind(1)
    seeds, top_k = torch.stack((torch.arange(batch) - 3, everything.filters.top_k), 1).unbind(1)
    filters = Filters(heat, top_k, top_p, min_p)
    assert not heat.is_contiguous() and not seeds.is_contiguous()
    noise = scaled_noise(seeds, heat, length, 4, vocab)
    places = length[:, None] + depths + 1
    triton = get_ops("triton", CPU)
    with pytest.MonkeyPatch.context() as patch:
        # The filters alone take whole rows, three at once; with penalties a row is divided.
        patch.setattr(sampler, "CHUNK_LOGITS", 400)
        patch.setattr(sampler, "CPU_BLOCK_LOGITS", 80)
        for given in (Sampling(filters, everything.adjustments), Sampling(filters)):
            inputs = (given, depths, places, paths)
            want = choose_nodes(
                Vocabulary(Target(vocab), get_ops("torch", CPU)), logits, noise, *inputs
            )
            got = choose_nodes(
                Vocabulary(Target(vocab), triton), logits, None, *inputs, seeds=seeds
            )
            assert torch.equal(got, want)
            assert not torch.equal(got, logits.argmax(-1))


def flash_double(q, k_cache, v_cache, *, cache_seqlens, block_table, softmax_scale, causal, **kw):
    """What flash-attn 2 asks of its arguments, and computes from them."""
    (left, right), page = kw.pop("window_size"), k_cache.shape[1]
    assert not kw and causal and right in (0, -1)
    assert page % 256 == 0 and k_cache.stride(-1) == v_cache.stride(-1) == q.stride(-1) == 1
    assert cache_seqlens.dtype == block_table.dtype == torch.int32
    rows = []
    for row in range(q.shape[0]):
        length = int(cache_seqlens[row])
        k, v = (cache[block_table[row].long()].flatten(0, 1) for cache in (k_cache, v_cache))
        last = torch.arange(length - q.shape[1], length)[:, None]
        key = torch.arange(length)
        mask = (key <= last) & ((left < 0) | (key >= last - left))
        k, v = (x[:length].transpose(0, 1).double() for x in (k, v))
        group = q.shape[2] // k.shape[0]
        k, v = (x.repeat_interleave(group, 0) for x in (k, v))
        scores = q[row].transpose(0, 1).double() @ k.mT * softmax_scale
        rows.append((scores.masked_fill(~mask, -math.inf).softmax(-1) @ v).transpose(0, 1))
    return torch.stack(rows)


@pytest.mark.parametrize("window", [0, 7, 300])
def test_calls_to_flash_attn(window):
    case = Case(("causal", window), (300, 0), 5, (4, 2), 64, 256, "fp16")
    q, kv, table, prefix, _, slots = make(case)
    plan = PagedPlan(table, prefix, None, 5, 256, (case.view,))
    for _ in range(2):
        out = flash.attend(flash_double, q, kv, plan, window, 64**-0.5)
    for row, truth in enumerate(oracle(case, q, kv, None, slots)):
        torch.testing.assert_close(out[row], truth)


def test_where_flash_attn_cannot_serve(monkeypatch):
    assert flash.refusal(256, torch.bfloat16, 128) == flash.refusal(512, torch.float16, 96) == ""
    assert "16" in flash.refusal(16, torch.bfloat16, 128)
    assert "float32" in flash.refusal(256, torch.float32, 128)
    assert "512" in flash.refusal(256, torch.float16, 512)
    assert flash.load(CPU)[0] is None
    module = types.ModuleType("flash_attn")
    module.__version__ = "2.8"
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    assert flash.load(CUDA)[0] is None
    module.flash_attn_with_kvcache = flash_double
    assert flash.load(CUDA) == (flash_double, "flash-attn 2.8")
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    assert flash.load(CUDA)[0] is None


def test_flash_attn_serves_causal_calls_and_the_log_says_so_once(caplog):
    ops = get_ops("triton", torch.device("meta"))
    calls = []

    def function(q, *args, **kwargs):
        calls.append(kwargs["causal"])
        return torch.empty_like(q)

    ops._flash, ops._flash_state = function, "flash-attn 2.8"
    table, prefix = (torch.zeros(*s, dtype=torch.int64, device="meta") for s in ((1, 2), (1,)))
    words = torch.zeros(1, 3, 1, dtype=torch.int64, device="meta")
    kv = torch.zeros(512, 2, 2, 64, dtype=torch.bfloat16, device="meta")
    q = torch.zeros(1, 3, 4, 64, dtype=torch.bfloat16, device="meta")
    with caplog.at_level("INFO", "ddtree"):
        for page in (256, 16):
            views = (CAUSAL, ("full", 0), ("tree", 0))
            plan = ops.plan_attention(table, prefix, 3, page, views, words)
            for view in views * 2:
                assert ops.attention(q, kv, plan, view, 0.125).shape == q.shape
    assert calls == [True, True]
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and "flash-attn 2.8" in told[0] and "triton" in told[1]
    assert ops.describe()["causal attention"].startswith("flash-attn 2.8, triton (")
