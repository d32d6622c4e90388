"""Filter, noise, choice and candidate kernels against their torch twins and float64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from kernel_tools import interpreted

from ddtree.kernels import candidates, node_choice
from ddtree.kernels import filter_threshold as thresholds
from ddtree.kernels.candidates import rank_candidates
from ddtree.kernels.filter_threshold import filter_threshold
from ddtree.kernels.fused import TritonOps
from ddtree.kernels.gumbel import gumbel, noise_bits, noise_key
from ddtree.kernels.lazy import Arg, constexpr, kernel, tl
from ddtree.kernels.node_choice import choose_tokens
from ddtree.kernels.reference import TorchOps
from ddtree.kernels.sampling import Filters, filter_logits
from ddtree.kernels.sampling import filter_threshold as torch_filter_threshold
from ddtree.kernels.sampling import rank_candidates as torch_rank_candidates
from ddtree.kernels.shards import chosen_ids, merge_candidates, pack_candidates
from ddtree.tree import noise

CPU = torch.device("cpu")


def make_logits(*shape, seed=0, spread=3.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * spread


def make_filters(temperature, top_k=None, top_p=None, min_p=None):
    columns = (None if c is None else torch.tensor(c) for c in (temperature, top_k, top_p, min_p))
    return Filters(*columns)


@kernel
def _noise(seeds: Arg, positions: Arg, ids: Arg, bits: Arg, values: Arg, SIZE: constexpr) -> None:
    row = tl.program_id(0)
    place = tl.arange(0, SIZE)
    low, high = noise_key(tl.load(seeds + row), tl.load(positions + row))
    found = noise_bits(tl.load(ids + place), low, high)
    tl.store(bits + row * SIZE + place, found.to(tl.int32, bitcast=True))
    tl.store(values + row * SIZE + place, gumbel(found))


@interpreted
def test_the_noise_s_integers_are_the_torch_ones_and_its_numbers_as_exact():
    generator = torch.Generator().manual_seed(1)
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 123456789])
    positions = torch.tensor([0, 1, 2**20, 2**31, 77, 5])
    ids = torch.randint(262144, (2048,), generator=generator)
    bits = torch.empty(6, 2048, dtype=torch.int32)
    values = torch.empty(6, 2048)
    _noise[(6,)](seeds, positions, ids, bits, values, SIZE=2048)
    expected = noise.token_bits(seeds, positions[:, None], ids.expand(6, 1, -1)).squeeze(1)
    assert torch.equal(bits, expected)
    check_gumbel(expected, values)


@kernel
def _gumbel_of(bits: Arg, values: Arg, SIZE: constexpr) -> None:
    place = tl.arange(0, SIZE)
    tl.store(values + place, gumbel(tl.load(bits + place).to(tl.uint32, bitcast=True)))


@interpreted
def test_the_noise_s_tails():
    edges = [0, 1, 2, 3, 255, 256, 2**8 - 1, 2**24, 2**31 - 1, -(2**31), -1, -2, -127, -128, -129]
    bits = torch.tensor([*edges, *(2**k + 1 for k in range(17))], dtype=torch.int32)
    values = torch.empty(len(bits))
    _gumbel_of[(1,)](bits, values, SIZE=len(bits))
    check_gumbel(bits, values)
    assert values.min() > -2.82 and values.max() < 22.88


def check_gumbel(bits, values):
    """Within twice the error of the torch noise, and a few units in the last place."""
    u = ((bits.long() % 2**32).float().double() + 0.5).float().double() * 2.0**-32
    exact = -(-torch.log1p(-u.clamp(max=1 - 2.0**-24))).log()
    own = (values.double() - exact).abs()
    torch_error = (noise.bits_to_gumbel(bits).double() - exact).abs().max()
    assert own.max() <= 2 * torch_error
    assert (own <= 4e-7 * exact.abs().clamp(min=1.0)).all()


SETTINGS = {
    "top_k": {"temperature": [1.0, 0.5], "top_k": [7, 0]},
    "top_k of all": {"temperature": [1.0, 1.0], "top_k": [300, 5000]},
    "top_p": {"temperature": [0.7, 1.5], "top_p": [0.9, 0.3]},
    "top_p of all or one": {"temperature": [1.0, 1.0], "top_p": [1.0, 1e-6]},
    "min_p": {"temperature": [0.7, 0.0], "min_p": [0.05, 0.5]},
    "all": {
        "temperature": [0.7, 1.3],
        "top_k": [20, 0],
        "top_p": [0.8, 0.99],
        "min_p": [0.01, 0.0],
    },
    "hot": {"temperature": [30.0, 1e-3], "top_k": [0, 9], "top_p": [0.5, 0.5]},
}


@pytest.mark.parametrize("setting", SETTINGS)
@interpreted
def test_thresholds_equal_the_torch_ones(setting):
    filters = make_filters(**SETTINGS[setting])
    logits = make_logits(2, 1, 300)
    assert torch.equal(filter_threshold(logits, filters), torch_filter_threshold(logits, filters))


@interpreted
def test_thresholds_of_ties_infinities_and_rows_in_several_blocks():
    filters = make_filters([0.7, 1.3], [20, 3], [0.8, 0.99])
    ties = make_logits(2, 1, 200).round()
    ties[0, 0, ::3] = -torch.inf
    ties[1, 0, 5:] = -1e30
    zeros = torch.tensor([0.0, -0.0, 1.0, -1.0]).repeat(50).expand(2, 1, -1).contiguous()
    for logits in (ties, zeros, make_logits(2, 1, thresholds.BLOCK + 5), make_logits(2, 1, 1)):
        expected = torch_filter_threshold(logits, filters)
        assert torch.equal(filter_threshold(logits, filters), expected)


@interpreted
def test_thresholds_in_half_precision():
    filters = make_filters([0.7, 1.3], [20, 0], [0.8, 0.9])
    logits = make_logits(2, 2, 300).half()
    expected = torch_filter_threshold(logits.float(), filters)
    assert torch.equal(filter_threshold(logits, filters), expected)


def torch_choice(logits, filters, seeds, positions, first_id=0):
    logits = logits.float().clone()
    if filters is not None:
        logits = filter_logits(logits, filters)
        if seeds is not None:
            drawn = noise.gumbel(seeds, positions, first_id, logits.shape[2])
            logits += drawn * filters.temperature[:, None, None]
    return logits.argmax(-1)


@pytest.mark.parametrize("setting", [None, "top_k", "top_p", "min_p", "all"])
@interpreted
def test_choices_equal_the_torch_ones(setting):
    filters = None if setting is None else make_filters(**SETTINGS[setting])
    logits, positions = make_logits(2, 3, 300), torch.tensor([[9, 10, 10], [1000, 3, 4]])
    seeds = torch.tensor([7, -8])
    chosen, packed = choose_tokens(logits, filters, seeds, positions)
    assert torch.equal(chosen, torch_choice(logits, filters, seeds, positions))
    assert torch.equal(~packed & 0xFFFFFFFF, chosen)


@interpreted
def test_a_greedy_row_takes_no_noise_and_the_smallest_of_equal_ids():
    logits = torch.zeros(2, 1, 100)
    logits[0, 0, [40, 41]] = 1.0
    logits[1, 0, :30] = -0.0
    logits[1, 0, 50:] = -torch.inf
    filters = make_filters([0.0, 0.0], top_k=[3, 0])
    chosen, _ = choose_tokens(logits, filters, torch.tensor([1, 2]), torch.tensor([[3], [4]]))
    assert chosen.tolist() == [[40], [0]]
    assert choose_tokens(logits.half())[0].tolist() == [[40], [0]]
    assert choose_tokens(torch.full((1, 1, 40), -torch.inf), None, first_id=7)[0].tolist() == [[7]]


@interpreted
def test_shards_join_to_the_choice_of_the_whole():
    filters = make_filters([1.0, 0.8], top_p=[0.95, 1.0])
    logits, positions = make_logits(2, 2, 300, spread=1.0), torch.tensor([[1, 2], [3, 4]])
    seeds = torch.tensor([7, -8])
    whole, packed = choose_tokens(logits, filters, seeds, positions)
    least = torch_filter_threshold(logits, filters)
    parts = [
        choose_tokens(part.contiguous(), filters, seeds, positions, first, least)[1]
        for first, part in zip((0, 130), logits.split((130, 170), 2), strict=True)
    ]
    joined = torch.maximum(*parts)
    assert torch.equal(joined, packed) and torch.equal(~joined & 0xFFFFFFFF, whole)


@pytest.mark.parametrize("programs", [1, 512])
@interpreted
def test_a_row_in_several_blocks_of_one_program_and_of_many(programs):
    usual, node_choice.PROGRAMS = node_choice.PROGRAMS, programs
    logits = make_logits(1, 1, 3 * node_choice.BLOCK + 7)
    assert choose_tokens(logits)[0].item() == logits.argmax()
    logits[0, 0, [5, node_choice.BLOCK + 5, 2 * node_choice.BLOCK + 5]] = 99.0
    assert choose_tokens(logits)[0].item() == 5
    logits[0, 0, -1] = 100.0
    assert choose_tokens(logits)[0].item() == logits.shape[2] - 1
    node_choice.PROGRAMS = usual


def check_weights(found, twin, exact):
    """Within twice the torch twin's error against float64."""
    own, other = ((x.double() - exact).abs().max() for x in (found, twin))
    assert own <= 2 * other + 1e-6, (own, other)


@pytest.mark.parametrize("count", [1, 5, 64, 300])
@interpreted
def test_candidates_equal_the_torch_ones(count):
    logits = make_logits(1, 2, 300)
    ids, weights = rank_candidates(logits, None, count)
    twin_ids, twin = TorchOps(CPU).top_candidates(logits, count)
    exact = logits.double().log_softmax(-1).gather(2, twin_ids)
    assert torch.equal(ids, twin_ids)
    check_weights(weights, twin, exact)
    fused_ids, fused = TritonOps(CPU).top_candidates(logits[0], count)
    assert torch.equal(fused_ids, ids[0]) and torch.equal(fused, weights[0])


@interpreted
def test_tempered_candidates():
    logits, temperature = make_logits(3, 1, 300), torch.tensor([0.0, 0.4, 2.0])
    ids, weights = rank_candidates(logits, temperature, 10)
    twin_ids, twin = torch_rank_candidates(logits, temperature, 10)
    divisor = torch.tensor([1.0, 0.4, 2.0])[:, None, None]
    exact = (logits.double() / divisor.double()).log_softmax(-1).gather(2, twin_ids)
    assert torch.equal(ids, twin_ids)
    check_weights(weights, twin, exact)


@interpreted
def test_coupled_candidates():
    logits, temperature = make_logits(3, 2, 300), torch.tensor([0.0, 0.4, 2.0])
    seeds, positions = torch.tensor([4, 5, -6]), torch.tensor([[1, 2], [3, 4], [99, 100]])
    alpha, scale = torch.tensor([1.5, 0.8]), torch.tensor([2.0, 1.2])
    ids, weights = rank_candidates(logits, temperature, 10, seeds, positions, alpha, scale)
    drawn = noise.gumbel(seeds, positions, 0, 300) * temperature[:, None, None]
    twin_ids, twin = torch_rank_candidates(logits, temperature, 10, drawn, alpha, scale)
    scores = (logits.double() * alpha[:, None] + drawn).gather(2, twin_ids)
    divisor = (temperature[:, None] * scale)[:, :, None].double()
    exact = (scores / divisor).log_softmax(-1)
    exact[0] = logits[0].double().log_softmax(-1).gather(1, twin_ids[0])
    assert torch.equal(ids, twin_ids)
    check_weights(weights, twin, exact)


@pytest.mark.parametrize("size", [2, 3])
@interpreted
def test_shards_together_are_the_whole(size):
    """Candidates, plain and coupled, and choices under filters and noise."""
    logits, temperature = make_logits(3, 2, 301), torch.tensor([0.0, 0.4, 2.0])
    seeds, positions = torch.tensor([4, 5, -6]), torch.tensor([[1, 2], [3, 4], [99, 100]])
    alpha, scale = torch.tensor([1.5, 0.8]), torch.tensor([2.0, 1.2])
    ops = TritonOps(CPU)
    cuts = [301 * rank // size for rank in range(size + 1)]
    shards = [(a, logits[..., a:b].contiguous()) for a, b in pairwise(cuts)]
    for count in (1, 10, 200):
        for drawn in ((), (seeds, positions, alpha)):
            numbers = (*drawn, scale) if drawn else ()
            width = min(count, -(-301 // size))
            sent = [
                pack_candidates(*ops.local_candidates(x, temperature, count, a, *drawn), width)
                for a, x in shards
            ]
            merged = merge_candidates(
                torch.stack(sent), temperature, count, scale if drawn else None
            )
            ids, weights = rank_candidates(logits, temperature, count, *numbers)
            assert torch.equal(merged[0], ids)
            assert torch.allclose(merged[1], weights, atol=2e-6)
    filters = Filters(temperature, torch.tensor([5, 0, 30]), torch.tensor([1.0, 0.8, 0.9]))
    least = filter_threshold(logits, filters)
    packed = [ops.local_choice(x, a, filters, seeds, positions, least) for a, x in shards]
    whole = choose_tokens(logits, filters, seeds, positions)
    assert torch.equal(torch.stack(packed).amax(0), whole[1])
    packed = torch.stack([ops.local_choice(x[0, 0], a) for a, x in shards])
    assert int(chosen_ids(packed.amax(0))) == int(logits[0, 0].argmax())


@interpreted
def test_candidates_with_ties_and_of_rows_in_many_parts():
    ties = make_logits(1, 1, 5000).round()
    ties[..., ::3] = -torch.inf
    for count, merged in ((20, 8192), (20, 40), (1, 8192)):
        candidates.MERGED = merged
        ids, weights = rank_candidates(ties, None, count)
        order = ties[0, 0].sort(descending=True, stable=True)
        assert torch.equal(ids[0, 0], order.indices[:count])
        exact = ties[0, 0].double().log_softmax(-1)[ids[0, 0]]
        assert (weights[0, 0] - exact).abs().max() < 1e-5
    candidates.MERGED = 8192


@pytest.mark.parametrize("bits", [0x7FFFFFFF, 0x7FC00000, -1, -0x400000])
@pytest.mark.parametrize("places", [[0], [7], list(range(40))])
@interpreted
def test_nan_is_no_candidate(bits, places):
    """Neither an endless search nor an id beyond the vocabulary, whatever the NaN's bits."""
    logits = make_logits(1, 2, 40)
    logits.view(torch.int32)[0, 0, places] = bits
    seeds, positions = torch.tensor([3]), torch.tensor([[5, 6]])
    ones = torch.ones(2)
    for drawn in ((), (seeds, positions, ones, ones)):
        ids, _ = rank_candidates(logits, torch.tensor([0.9]), 4, *drawn)
        assert int(ids.min()) >= 0 and int(ids.max()) < 40
        assert ids[0, 0].unique().numel() == 4
        if len(places) == 1:
            assert not set(places) & set(ids[0, 0].tolist())


@interpreted
def test_candidates_in_half_precision():
    logits = make_logits(1, 2, 300).half()
    ids, weights = rank_candidates(logits, None, 5)
    exact = logits.double().log_softmax(-1).gather(2, ids)
    assert (weights - exact).abs().max() < 1e-5
    assert torch.equal(exact, logits.double().log_softmax(-1).topk(5).values)


@interpreted
def test_the_kernel_set_s_argmax():
    logits = make_logits(2, 3, 100)
    assert torch.equal(TritonOps(CPU).argmax(logits), logits.argmax(-1))
    assert TritonOps(CPU).argmax(logits[0, 0]).item() == logits[0, 0].argmax()


def test_shapes_without_running():
    logits = torch.empty(2, 3, 100, device="meta")
    number = torch.empty(2, device="meta")
    filters = Filters(number, top_p=number)
    assert filter_threshold(logits, filters).shape == (2, 3)
    seeds, positions = number.long(), torch.empty(2, 3, dtype=torch.int64, device="meta")
    for found in choose_tokens(logits, filters, seeds, positions):
        assert found.shape == (2, 3) and found.dtype == torch.int64
    ids, weights = rank_candidates(logits, number, 7)
    assert ids.shape == weights.shape == (2, 3, 7)
    assert ids.dtype == torch.int64 and weights.dtype == torch.float32


LOGITS, TWO = torch.zeros(2, 3, 50), torch.ones(2)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: filter_threshold(LOGITS[0], Filters(TWO)), "logits"),
        (lambda: filter_threshold(LOGITS.double(), Filters(TWO)), "logits"),
        (lambda: filter_threshold(LOGITS.mT, Filters(TWO)), "logits"),
        (lambda: filter_threshold(LOGITS, Filters(TWO[:1])), "temperature"),
        (lambda: filter_threshold(LOGITS, Filters(TWO, top_k=TWO)), "top_k"),
        (lambda: filter_threshold(LOGITS, Filters(TWO, top_p=TWO.long())), "top_p"),
        (lambda: filter_threshold(LOGITS, Filters(TWO, min_p=TWO.double())), "min_p"),
        (lambda: choose_tokens(LOGITS, Filters(TWO), TWO), "seeds"),
        (lambda: choose_tokens(LOGITS, Filters(TWO), TWO.long()), "positions"),
        (lambda: choose_tokens(LOGITS, Filters(TWO), TWO.long(), TWO.long()), "positions"),
        (lambda: choose_tokens(LOGITS, None, thresholds=TWO), "thresholds"),
        (lambda: rank_candidates(LOGITS, None, 51), "count"),
        (lambda: rank_candidates(LOGITS, TWO[:1], 5), "temperature"),
        (lambda: rank_candidates(LOGITS, TWO, 5, TWO.long()), "seeds"),
    ],
)
def test_what_they_refuse(call, name):
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        call()
