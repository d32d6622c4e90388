"""Norm, gate and rotation kernels: within twice torch's error against float64."""

import pytest
import torch
from kernel_tools import interpreted

from ddtree.kernels.elementwise import add_rms_norm, rms_norm, rope, silu_mul
from ddtree.kernels.reference import TorchOps

TWIN = TorchOps(torch.device("cpu"))
DTYPES = [torch.float32, torch.float16]


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(found, twin, exact):
    """Within twice the torch op's error, or half a unit in the last place of the result's type."""
    assert found.dtype == twin.dtype and found.shape == twin.shape and found.is_contiguous()
    unit = torch.finfo(found.dtype).eps * exact.abs().max()
    own, other = ((x.double() - exact).abs().max() for x in (found, twin))
    assert own <= torch.maximum(2 * other, unit), (own, other)


def exact_norm(x, weight, eps):
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 3, 576), (5, 96), (2, 3, 4, 80), (7,)], ids=str)
@interpreted
def test_rms_norm(shape, dtype):
    x, weight = 3 * randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
    check(rms_norm(x, weight, 1e-5), TWIN.rms_norm(x, weight, 1e-5), exact_norm(x, weight, 1e-5))


@pytest.mark.parametrize("tokens", [(1, 1), (3, 1), (1, 3), (2, 3)], ids=str)
@interpreted
def test_rms_norm_of_heads_cut_out_of_longer_ones(tokens):
    heads, weight = randn(*tokens, 10, 16), randn(16, seed=1)
    for part in heads.split((6, 2, 2), 2):
        exact = exact_norm(part, weight, 1e-6)
        check(rms_norm(part, weight, 1e-6), TWIN.rms_norm(part, weight, 1e-6), exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@interpreted
def test_the_residual_is_added_before_the_norm(dtype):
    x, residual = (randn(2, 3, 96, dtype=dtype, seed=seed) for seed in (1, 2))
    weight = randn(96, dtype=dtype, seed=3)
    total, normed = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    check(normed, TWIN.rms_norm(total, weight, 1e-5), exact_norm(total, weight, 1e-5))


@interpreted
def test_a_row_of_zeros_and_one_of_large_numbers():
    x = torch.stack((torch.zeros(64), torch.full((64,), 1e15)))
    assert rms_norm(x, torch.ones(64), 1e-6).tolist() == [[0.0] * 64, [1.0] * 64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 192), (1, 2050), (4, 2), (0, 8)], ids=str)
@interpreted
def test_silu_mul(shape, dtype):
    x = 4 * randn(*shape, dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    found, twin = silu_mul(x), TWIN.silu_mul(x)
    assert found.shape == twin.shape
    if x.numel():
        check(found, twin, gate / (1 + (-gate).exp()) * up)


@interpreted
def test_silu_mul_far_out():
    x = torch.tensor([[-200.0, 200.0, 0.0, 1.0, 1.0, 5.0]])
    assert silu_mul(x).tolist() == [[0.0, 200.0, 0.0]]


def rotated(x, cos, sin):
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), -1).double()
    return x.double() * cos.double() + swapped * sin.double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 80, 96])
@pytest.mark.parametrize("tokens", [(1, 1), (3, 1), (2, 3)], ids=str)
@interpreted
def test_rope(tokens, dim, dtype):
    heads = randn(*tokens, 7, dim, dtype=dtype)
    cos, sin = (randn(*tokens, 1, dim, seed=seed) for seed in (1, 2))
    q, kv = heads.split((3, 4), 2)
    for x in (heads, q):
        check(rope(x, cos, sin), TWIN.rope(x, cos, sin), rotated(x, cos, sin))
    out = kv[:, :, :3]
    value = kv[:, :, 3].clone()
    assert rope(q, cos, sin, out=out) is out
    assert torch.equal(out, rope(q, cos, sin)) and torch.equal(kv[:, :, 3], value)
    expected = rope(q, cos, sin)
    assert rope(q, cos, sin, out=q) is q and torch.equal(q, expected)
    assert torch.equal(heads[:, :, 6], value)


def test_shapes_without_running():
    x = torch.empty(2, 3, 4, 16, device="meta")
    angles = torch.empty(2, 3, 1, 16, device="meta")
    weight = torch.empty(16, device="meta")
    for found in (rms_norm(x, weight, 1e-5), *add_rms_norm(x, x, weight, 1e-5)):
        assert found.shape == x.shape and found.is_meta
    assert rope(x, angles, angles).shape == x.shape
    assert rope(x, angles, angles, out=x) is x
    assert silu_mul(x).shape == (2, 3, 4, 8)


X, ANGLES, WEIGHT = torch.zeros(2, 3, 4, 16), torch.zeros(2, 3, 1, 16), torch.zeros(16)


@interpreted
def test_rows_that_are_one_row_in_memory():
    """Expanded inputs have a stride of 0, which is a stride like any other."""
    ops = TorchOps(torch.device("cpu"))
    x = torch.randn(1, 3, 4, 8, generator=torch.Generator().manual_seed(1)).expand(2, 3, 4, 8)
    y = torch.randn(1, 1, 4, 8, generator=torch.Generator().manual_seed(2)).expand(2, 3, 4, 8)
    for given in (x, y):
        weight = torch.rand(8) + 0.5
        try:
            found = rms_norm(given, weight, 1e-6)
        except ValueError:
            assert given is x
            continue
        assert torch.allclose(found, ops.rms_norm(given, weight, 1e-6), atol=1e-6)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: rms_norm(X, WEIGHT[1:], 1e-5), "weight"),
        (lambda: rms_norm(X, WEIGHT.half(), 1e-5), "weight"),
        (lambda: rms_norm(X.mT, WEIGHT[:4], 1e-5), "x"),
        (lambda: rms_norm(X.transpose(0, 1), WEIGHT, 1e-5), "x"),
        (lambda: rms_norm(X.double(), WEIGHT.double(), 1e-5), "x"),
        (lambda: rms_norm(torch.zeros(1, 40000), torch.zeros(40000), 1e-5), "x"),
        (lambda: add_rms_norm(X, X[:1], WEIGHT, 1e-5), "residual"),
        (lambda: add_rms_norm(X[:, :, :2], X[:, :, :2], WEIGHT, 1e-5), "x"),
        (lambda: silu_mul(X.mT), "gate_up"),
        (lambda: silu_mul(X[..., :3].contiguous()), "gate_up"),
        (lambda: silu_mul(X.long()), "gate_up"),
        (lambda: rope(X[0], ANGLES, ANGLES), "x"),
        (lambda: rope(X.transpose(0, 1), ANGLES, ANGLES), "x"),
        (lambda: rope(X, ANGLES.half(), ANGLES), "cos"),
        (lambda: rope(X, ANGLES, ANGLES[:1]), "sin"),
        (lambda: rope(X, ANGLES, ANGLES, out=X[:1]), "out"),
    ],
)
def test_what_they_refuse(call, name):
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        call()
