"""The kernels that store to the KV pages, in the interpreter."""

import math

import pytest
import torch
from kernel_tools import interpreted
from test_kernels_attention import counted

from ddtree.kernels.kv_cache import move_kv, rotate_and_write, write_kv
from ddtree.kernels.reference import TorchOps

CPU = torch.device("cpu")
TORCH = TorchOps(CPU)
DTYPES = [torch.float32, torch.float16]


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def some_slots(count, among, seed=0):
    return torch.randperm(among, generator=torch.Generator().manual_seed(seed))[:count]


@pytest.mark.parametrize("shape", [(1, 1, 1, 64), (2, 5, 2, 80), (3, 4, 8, 256)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@interpreted
def test_write(shape, dtype):
    batch, tokens, heads, dim = shape
    # The first columns of the round's scratch slots.
    slots = some_slots(batch * (tokens + 2), 40).view(batch, -1)[:, :tokens]
    pool = torch.full((40, 2, heads, dim), math.nan, dtype=dtype)
    expected = pool.clone()
    # As the models hand it over: the last heads of a wider matrix product.
    wide = randn(batch, tokens, 3 + 2 * heads, dim, dtype=dtype)
    kv = wide[:, :, 3:].unflatten(2, (2, heads))
    write_kv(pool, slots, kv)
    TORCH.write_kv(expected, slots, kv)
    assert torch.equal(pool.nan_to_num(9.0), expected.nan_to_num(9.0))


def check_move(source, target, layers=2, heads=2, dim=64):
    source, target = (torch.tensor(slots, dtype=torch.int64) for slots in (source, target))
    kv = randn(layers, 60, 2, heads, dim)
    expected = kv.clone()
    TORCH.move_kv(expected, source, target)
    move_kv(kv, source, target)
    assert torch.equal(kv, expected)


MOVES = {
    "one": ([7], [3]),
    "nothing": ([4, 4, 9], [4, 4, 9]),
    "a path": ([11, 14, 20, 0, 0], [11, 12, 13, 0, 0]),
    "onto the next one's source": ([5, 6, 7, 9], [4, 5, 6, 7]),
    "backwards": ([4, 5, 6, 7], [5, 6, 7, 8]),
    "a cycle": ([1, 2, 3], [2, 3, 1]),
    "two requests and padding": ([13, 17, 0, 0, 33, 38, 39, 0], [12, 13, 0, 0, 32, 33, 34, 0]),
    "none": ([], []),
}


@pytest.mark.parametrize("name", MOVES)
@interpreted
def test_move(name):
    check_move(*MOVES[name])


@interpreted
def test_move_of_many_rows_and_odd_sizes():
    order = some_slots(50, 60)
    check_move(order.tolist(), some_slots(50, 60, seed=1).tolist(), layers=3, heads=3, dim=80)


@interpreted
def test_rows_that_stay_are_not_read():
    kv = randn(1, 30, 2, 1, 64)
    with counted(kv[0]) as loads:
        move_kv(kv, torch.tensor([8, 0, 5, 0]), torch.tensor([3, 0, 5, 0]))
    assert loads.nonzero().flatten().tolist() == [8]


@interpreted
def test_a_move_leaves_the_rest_alone():
    kv = torch.full((2, 30, 2, 1, 64), math.nan)
    kv[:, [8, 9]] = randn(2, 2, 2, 1, 64)
    before = kv.clone()
    move_kv(kv, torch.tensor([8, 9, 0]), torch.tensor([3, 4, 0]))
    assert torch.equal(kv[:, [3, 4]], before[:, [8, 9]])
    kv[:, [3, 4]] = math.nan
    assert torch.equal(kv.nan_to_num(7.0), before.nan_to_num(7.0))


def angles(batch, tokens, dim, dtype=torch.float32):
    """cos and sin as `Rope` gives them: the first half of sin negated."""
    angle = randn(batch, tokens, 1, dim // 2, seed=5) * 3
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotated(x, weight, eps, cos, sin, exact):
    """Norm and rotation of heads `x [B, T, h, D]`: in float64, or by the torch ops."""
    if not exact:
        x = x if weight is None else TORCH.rms_norm(x, weight, eps)
        return TORCH.rope(x.clone(), cos, sin)
    x, half = x.double(), x.shape[-1] // 2
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    cos, sin = cos.double(), sin.double()
    low, high = x[..., :half], x[..., half:]
    low, high = (
        low * cos[..., :half] + high * sin[..., :half],
        high * cos[..., half:] + low * sin[..., half:],
    )
    return torch.cat((low, high), -1)


def assert_as_close(found, torch_result, exact):
    error = (found.double() - exact).abs().max()
    allowed = 2 * (torch_result.double() - exact).abs().max()
    assert error <= allowed + torch.finfo(found.dtype).eps / 2 * exact.abs().max(), (error, allowed)


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 4, 2, 64), (1, 5, 5, 1, 80), (2, 1, 9, 3, 128)], ids=str)
@interpreted
def test_rotate_and_write(shape, dtype, norm):
    batch, tokens, q_heads, kv_heads, dim = shape
    wide = randn(batch, tokens, 1, q_heads + 2 * kv_heads + 1, dim, dtype=dtype)
    heads = wide[:, :, :, 1:]
    cos, sin = angles(batch, tokens, dim)
    weights = (randn(2, dim, seed=3) + 1).to(dtype) if norm else (None, None)
    slots = some_slots(batch * (tokens + 1), 20).view(batch, -1)[:, :tokens]
    pool = torch.full((1, 20, 2, kv_heads, dim), math.nan, dtype=dtype)
    q = rotate_and_write(heads, cos, sin, *weights, 1e-6, slots, pool)
    assert q.shape == (batch, tokens, q_heads, dim) and q.is_contiguous()
    assert pool[0, slots].isfinite().all()
    assert pool.isnan().sum() == pool.numel() - pool[0, slots].numel()
    queries, keys, values = heads[:, :, 0].split((q_heads, kv_heads, kv_heads), 2)
    assert torch.equal(pool[0, slots][:, :, 1], values)
    for found, x, weight in ((q, queries, weights[0]), (pool[0, slots][:, :, 0], keys, weights[1])):
        plain, exact = (rotated(x, weight, 1e-6, cos, sin, e) for e in (False, True))
        assert_as_close(found, plain, exact)


@pytest.mark.parametrize("norm", [True, False], ids=["norm", "plain"])
@interpreted
def test_context_rows_of_all_layers_at_once(norm):
    """The drafter's context: no queries, a norm weight per layer."""
    layers, heads, dim, dtype = 3, 2, 64, torch.float16
    rows = randn(2, 4, layers, 2 * heads, dim, dtype=dtype)
    cos, sin = angles(2, 4, dim)
    weight = (randn(layers, dim, seed=3) + 1).to(dtype) if norm else None
    slots = some_slots(8, 20).view(2, 4)
    pool = torch.zeros(layers, 20, 2, heads, dim, dtype=dtype)
    none = rotate_and_write(rows, cos, sin, None, weight, 1e-5, slots, pool)
    assert none.shape == (2, 4, 0, dim)
    for layer in range(layers):
        keys, values = rows[:, :, layer].split(heads, 2)
        assert torch.equal(pool[layer, slots][:, :, 1], values)
        own = None if weight is None else weight[layer]
        plain, exact = (rotated(keys, own, 1e-5, cos, sin, e) for e in (False, True))
        assert_as_close(pool[layer, slots][:, :, 0], plain, exact)


@interpreted
def test_schemas_and_fakes():
    tests = ("test_schema", "test_faketensor")
    pool, slots = randn(2, 20, 2, 2, 64), torch.tensor([[3, 4], [9, 8]])
    torch.library.opcheck(write_kv, (pool[0], slots, randn(2, 2, 2, 2, 64)), test_utils=tests)
    torch.library.opcheck(move_kv, (pool, slots[0], slots[1]), test_utils=tests)
    heads, weight = randn(2, 2, 1, 7, 64), randn(64)
    args = (heads, *angles(2, 2, 64), weight, weight, 1e-6, slots, pool[:1])
    torch.library.opcheck(rotate_and_write, args, test_utils=tests)


def test_what_does_not_fit_is_named():
    pool, slots = randn(1, 20, 2, 2, 64), torch.tensor([[3, 4]])
    kv, heads, weight = randn(1, 2, 2, 2, 64), randn(1, 2, 1, 7, 64), randn(64)
    cos, sin = angles(1, 2, 64)
    wide = randn(128)
    calls = {
        "kv": [
            lambda: write_kv(pool[0], slots[:, :1], kv),
            lambda: write_kv(pool[0], slots, kv.transpose(2, 3)),
            lambda: move_kv(pool[:, ::2], slots[0], slots[0]),
            lambda: rotate_and_write(heads, cos, sin, None, None, 0.0, slots, pool[..., :32]),
            lambda: move_kv(pool.double(), slots[0], slots[0]),
            lambda: move_kv(pool.char(), slots[0], slots[0]),
        ],
        "kv_layer": [lambda: write_kv(pool[0].half(), slots, kv)],
        "source": [
            lambda: move_kv(pool, slots[0, :1], slots[0]),
            lambda: move_kv(pool, slots.expand(2, 2)[:, 0], slots[0]),
            lambda: move_kv(pool, slots[0].int(), slots[0]),
        ],
        "target": [lambda: move_kv(pool, slots[0], slots[0].float())],
        "heads": [
            lambda: rotate_and_write(heads[:, :, :, :3], cos, sin, None, None, 0.0, slots, pool)
        ],
        "cos": [
            lambda: rotate_and_write(heads, cos[:, :1], sin, None, None, 0.0, slots, pool),
            lambda: rotate_and_write(heads, cos.half(), sin, None, None, 0.0, slots, pool),
        ],
        "slots": [
            lambda: rotate_and_write(heads, cos, sin, None, None, 0.0, slots[:, :1], pool),
            lambda: rotate_and_write(heads, cos, sin, None, None, 0.0, slots.float(), pool),
            lambda: write_kv(pool[0], slots.int(), kv),
        ],
        "q_weight": [
            lambda: rotate_and_write(heads, cos, sin, None, weight, 0.0, slots, pool),
            lambda: rotate_and_write(heads, cos, sin, weight[:3], weight, 0.0, slots, pool),
            lambda: rotate_and_write(heads, cos, sin, wide[::2], weight, 0.0, slots, pool),
        ],
        "k_weight": [
            lambda: rotate_and_write(heads, cos, sin, weight, weight[:9], 0.0, slots, pool),
            lambda: rotate_and_write(heads, cos, sin, weight, weight.half(), 0.0, slots, pool),
        ],
    }
    for name, attempts in calls.items():
        for attempt in attempts:
            with pytest.raises(ValueError, match=f"^{name}: "):
                attempt()
