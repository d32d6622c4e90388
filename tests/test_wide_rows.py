"""The largest entries of wide rows are those that torch finds."""

import pytest
import torch

from ddtree.kernels import wide_rows


@pytest.mark.parametrize("size", [101, 4096, 16384, 49152, 151936, 151943])
@pytest.mark.parametrize("shape", [(), (1, 5), (3, 2)])
def test_as_torch(size, shape):
    x = torch.randn(*shape, size, generator=torch.Generator().manual_seed(size))
    assert torch.equal(wide_rows.argmax(x), x.argmax(-1))
    for count in (1, 7, 40, 100):
        for mine, theirs in zip(wide_rows.topk(x, count), x.topk(count, -1), strict=True):
            assert torch.equal(mine, theirs)


def test_blocks_are_used_where_they_gain():
    assert [wide_rows._width(torch.empty(n)) for n in (101, 4096, 8192, 49152, 151936)] == [
        0, 64, 128, 256, 128,
    ]  # fmt: skip
    assert wide_rows._width(torch.empty(49152, device="meta")) == 0


@pytest.mark.parametrize("places", [[49151], [0, 49151], [255, 256], [300, 301], [1, 48000, 2]])
def test_the_first_of_equal_entries(places):
    x = torch.zeros(2, 49152)
    x[1, places] = 3.0
    assert wide_rows.argmax(x).tolist() == [0, min(places)]
    values, ids = wide_rows.topk(x[1:], len(places) + 2)
    assert values.tolist() == [[3.0] * len(places) + [0.0] * 2]
    assert set(places) <= set(ids[0].tolist()) and len(set(ids[0].tolist())) == len(places) + 2


def test_minus_infinity_and_nan():
    x = torch.full((3, 16384), -torch.inf)
    x[1, 9000] = -5.0
    x[2, [700, 12000]] = torch.nan
    assert wide_rows.argmax(x).tolist() == [0, 9000, 700]
    assert wide_rows.topk(x[1:2], 1)[1].tolist() == [[9000]]
    assert wide_rows.topk(x[2:], 2)[0].isnan().all()
