"""Weights packed for CPU libraries: nothing is lost, and rows do not depend on each other."""

from unittest import mock

import pytest
import torch
from fixtures import make_drafter, make_target, tiny_drafter, tiny_target
from safetensors.torch import load_file, save_file
from stubs import hf_generate

from ddtree import Engine, SamplingParams
from ddtree.kernels import get_ops, packed_linear
from ddtree.kernels.packed_linear import PackedLinear, packed_libraries, record

CPU = torch.device("cpu")
LIBRARIES = packed_libraries(CPU)


def weight(kind="halves", rows=96, columns=64):
    full = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 0.1
    if kind == "halves":
        return full.half().float()
    return full.bfloat16().float() if kind == "bfloats" else full


def packed(kind="halves", **sizes):
    return get_ops("torch", CPU).pack_linear(weight(kind, **sizes))


def assert_every_mode_gives_the_target_s_tokens(engine, target):
    """Greedy and sampled, alone and in a batch."""
    prompts = [[5, 6, 7], [9, 8], [11, 12, 13, 14, 15], [1]]
    outputs = {}
    for mode in ("off", "chain", "tree"):
        for temperature in (0.0, 1.0):
            params = SamplingParams(24, temperature=temperature, seed=3, speculation=mode)
            alone = [engine.generate([p], params)[0].token_ids for p in prompts]
            assert [o.token_ids for o in engine.generate(prompts, params)] == alone
            outputs.setdefault(temperature, []).append(alone)
    assert all(three[0] == three[1] == three[2] for three in outputs.values())
    assert outputs[0.0][0] == [hf_generate(target, p, 24) for p in prompts]


def test_this_machine_has_both_kinds():
    """Else the rest of this file would say nothing."""
    assert LIBRARIES[0] == "fbgemm" and len(LIBRARIES) == 2


@pytest.mark.parametrize(
    ("kind", "library", "exponent"),
    [("halves", "fbgemm", 0), ("bfloats", "fbgemm", 12), ("floats", LIBRARIES[-1], 0)],
)
@pytest.mark.parametrize(("rows", "columns"), [(96, 64), (101, 33), (7, 5), (1030, 1536)])
def test_products_and_their_rows(kind, library, exponent, rows, columns):
    plain = weight(kind, rows, columns)
    if kind == "bfloats":
        plain[0, 0] = 2.0**-20 * 1.9921875  # eight bits below float16's
    mine = get_ops("torch", CPU).pack_linear(plain)
    assert (mine.library, mine.exponent, mine.shape) == (library, exponent, (rows, columns))
    x = torch.randn(70, columns, generator=torch.Generator().manual_seed(1))
    product = mine.product(x)
    exact = x.double() @ plain.double().T
    scale = x.double().abs() @ plain.double().abs().T  # every sum's terms, all positive
    assert ((product - exact).abs() <= 2.0**-24 * columns**0.5 * 2 * scale).all()
    assert torch.equal(mine.product(x.view(2, 35, -1)).view(70, -1), product)
    assert mine.product(x[:0]).shape == (0, rows)
    if library == "fbgemm":
        for count in (1, 2, 3, 5, 8, 9, 14, 15, 31, 64, 70):
            assert torch.equal(mine.product(x[:count]), product[:count]), count


def test_every_bit_of_a_weight_is_kept():
    """Of the product with the identity, each entry is one weight."""
    plain = weight("bfloats")
    plain[0, :6] = torch.tensor([0.0, 15.9375, 2.0**-29, -(2.0**-28) * 1.5, 1.0, -0.0])
    mine = get_ops("torch", CPU).pack_linear(plain)
    assert (mine.library, mine.exponent) == ("fbgemm", 12)
    assert torch.equal(mine.product(torch.eye(64)).T, plain)


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("value", [1e-9, 1.0 + 2.0**-12, 1e5, 2.0**120, -INF, INF, NAN])
def test_a_weight_that_float16_cannot_hold_is_kept_in_float32(value):
    plain = weight()
    plain[50, 3] = value
    mine = get_ops("torch", CPU).pack_linear(plain)
    assert mine.library == LIBRARIES[-1]
    kept = mine.product(torch.eye(64)[3:4])[0, 50]
    assert torch.equal(kept, plain[50, 3]) or value != value
    assert plain[50, 3] == value or value != value


def test_nan_and_inf_of_one_row_stay_there():
    mine = packed()
    x = torch.randn(5, 64)
    expected = mine.product(x)
    x[1, 0], x[3, 5] = float("nan"), float("inf")
    product = mine.product(x)
    assert product[1].isnan().all()
    assert torch.equal(product[[0, 2, 4]], expected[[0, 2, 4]])


def test_a_recording_takes_other_weights():
    """Packed by different libraries, beside a plain tensor; only packings of the same kinds fit."""
    first = [packed(), packed("bfloats"), torch.randn(96), packed("floats")]
    first[1].exponent, again = 12, first[1]

    def run(x, half, scaled, bias, full):
        y = first[0].bind(half).product(x) + bias
        return y, again.bind(scaled).product(x) * 2, first[3].bind(full).product(y[:, :64])

    recording = record(run, [torch.ones(4, 64)], first)
    others = [packed(), packed("bfloats"), torch.randn(96), packed("floats")]
    for weights in (first, others):
        plain = [w.tensors[0] if isinstance(w, PackedLinear) else w for w in weights]
        x = torch.randn(4, 64)
        y = weights[0].product(x) + weights[2]
        want = y, again.bind(plain[1]).product(x) * 2, weights[3].product(y[:, :64])
        assert all(map(torch.equal, recording(x, *plain), want))


@pytest.mark.parametrize("missing", ["op", "recorder"])
def test_where_fbgemm_does_not_work_there_is_the_other(missing):
    packed_linear._works.cache_clear()
    place = (
        mock.patch.dict(packed_linear._PACK, {"fbgemm": mock.Mock(side_effect=RuntimeError)})
        if missing == "op"
        else mock.patch("torch._C._create_function_from_graph", side_effect=AttributeError)
    )
    try:
        with place:
            assert packed_libraries(CPU) == LIBRARIES[1:]
            assert packed().library == LIBRARIES[1]
    finally:
        packed_linear._works.cache_clear()


def test_without_a_library_for_all_weights_nothing_is_packed():
    """A weight given back would be a view of the loader's buffer."""
    nothing = mock.Mock(side_effect=RuntimeError)
    packed_linear._works.cache_clear()
    try:
        with mock.patch.dict(packed_linear._PACK, {"mkl": nothing, "mkldnn": nothing}):
            ops = get_ops("torch", CPU)
            assert ops.packer.libraries == () and not ops.packer.copies(weight())
    finally:
        packed_linear._works.cache_clear()


def test_without_a_recorder_other_libraries_still_pack():
    packed_linear._works.cache_clear()
    try:
        with mock.patch("torch.jit.trace", side_effect=AttributeError):
            assert packed_libraries(CPU) == LIBRARIES[1:]
    finally:
        packed_linear._works.cache_clear()


def test_a_recording_of_another_use_of_a_weight_is_refused():
    with pytest.raises(RuntimeError, match="used by aten::mul"):
        record(lambda x, w: (x @ (w * 2).T,), [torch.ones(4, 64)], [packed()])


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_layers_packed_differently(architecture):
    """Groups of one recording each, and groups that share one; tokens as with plain float32."""
    target = make_target(architecture, num_hidden_layers=14, dtype=torch.float16)
    weights = load_file(target / "model.safetensors")
    for layer in range(0, 14, 2):
        name = ("mlp.down_proj", "self_attn.o_proj", "mlp.up_proj")[layer % 3]
        shape = weights[f"model.layers.{layer}.{name}.weight"].shape
        weights[f"model.layers.{layer}.{name}.weight"] = torch.randn(shape) * 0.02
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        weights[name] = weights[name].bfloat16() * 2.0**-12
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    engine = Engine(str(target), str(tiny_drafter(architecture)), budget=7)
    assert engine.describe()["linear"] == " + ".join(sorted(LIBRARIES))
    for mode in ("off", "tree"):
        tokens = engine.generate([[5, 6, 7]], SamplingParams(24, speculation=mode))[0].token_ids
        assert tokens == hf_generate(target, [5, 6, 7], 24)


def test_other_devices_and_types_stay_as_they_are():
    ops = get_ops("torch", CPU)
    half = weight().half()
    assert ops.pack_linear(half) is half
    assert packed_libraries(torch.device("cuda")) == ()


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_engine_with_weights_in_float16(architecture, dtype):
    target = make_target(architecture, dtype=dtype)
    engine = Engine(str(target), str(make_drafter(target)), budget=7, max_batch_size=4)
    assert "fbgemm" in engine.describe()["linear"]
    assert_every_mode_gives_the_target_s_tokens(engine, target)


def test_describe_names_the_libraries_in_use():
    assert Engine(str(tiny_target())).describe()["linear"] == LIBRARIES[1]
    halves = make_target(dtype=torch.float16)
    assert Engine(str(halves)).describe()["linear"] == "fbgemm"
    both = Engine(str(halves), str(tiny_drafter())).describe()["linear"]
    assert both == " + ".join(sorted(LIBRARIES))


# -- 8 bits, for drafts ----------------------------------------------------------------------------


def eight_bits(rows=96, columns=64):
    with mock.patch.object(packed_linear, "LEAST_INT8", 1):
        found = get_ops("torch", CPU).pack_linear(weight(rows=rows, columns=columns), drafts=True)
    assert found.library == "int8" and found.shape == (rows, columns)
    return found


@pytest.mark.parametrize(("rows", "columns"), [(96, 64), (101, 33), (7, 5), (1030, 1536)])
def test_products_of_drafts_are_near(rows, columns):
    mine, x = eight_bits(rows, columns), torch.randn(2, 3, columns)
    exact = x @ weight(rows=rows, columns=columns).T
    product = mine.product(x)
    assert product.shape == (2, 3, rows) and product.dtype == torch.float32
    assert (product - exact).norm() < 0.03 * exact.norm()
    assert not torch.equal(product, exact)


def test_weights_of_drafts_are_within_half_a_level():
    """Of the product with the identity, each entry is one weight."""
    plain = weight(rows=96, columns=64)
    level = plain.abs().amax(1) / 127
    found = eight_bits(96, 64).product(torch.eye(64)).T
    assert ((found - plain).abs() <= 0.51 * level[:, None]).all()


def test_drafts_of_numbers_that_are_none_are_no_error():
    mine, x = eight_bits(), torch.randn(5, 64)
    x[1, 0], x[3, 5], x[3, 6] = NAN, INF, -INF
    assert mine.product(x).isfinite().all()
    assert mine.product(torch.full((2, 64), NAN)).abs().max() == 0


def test_a_recording_takes_weights_of_8_bits():
    first = [eight_bits(), packed(), eight_bits(64, 96)]

    def run(x, one, half, two):
        y = first[0].bind(one).product(x) + first[1].bind(half).product(x)
        return y, first[2].bind(two).product(y)

    recording = record(run, [torch.ones(4, 64)], first)
    x = torch.randn(4, 64)
    y = first[0].product(x) + first[1].product(x)
    found = recording(x, *(w.tensors[0] for w in first))
    assert torch.equal(found[0], y) and torch.equal(found[1], first[2].product(y))


def test_only_large_weights_of_drafts_are_in_8_bits():
    ops, large = get_ops("torch", CPU), weight(rows=600, columns=512)
    assert ops.pack_linear(large, drafts=True).library == "int8"
    assert ops.pack_linear(large).library == "fbgemm"
    assert ops.pack_linear(weight(), drafts=True).library == "fbgemm"
    packed_linear._works.cache_clear()
    try:
        with mock.patch.dict(packed_linear._PACK, {"int8": mock.Mock(side_effect=RuntimeError)}):
            assert ops.pack_linear(large, drafts=True).library == "fbgemm"
    finally:
        packed_linear._works.cache_clear()


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_drafts_in_8_bits_change_no_token(architecture, monkeypatch):
    monkeypatch.setattr(packed_linear, "LEAST_INT8", 1)
    target = make_target(architecture)
    engine = Engine(str(target), str(make_drafter(target)), budget=7, max_batch_size=4)
    assert engine.describe()["linear"] == f"int8 + {LIBRARIES[1]}"
    drafter = engine._drafter
    assert drafter.fc.weight.library == LIBRARIES[1]
    inner = [drafter.context_kv, drafter.layers[0].mlp.down, drafter.layers[1].attention.output]
    assert {linear.weight.library for linear in inner} == {"int8"}
    assert engine._target.layers[0].mlp.down.weight.library == LIBRARIES[1]
    assert_every_mode_gives_the_target_s_tokens(engine, target)
