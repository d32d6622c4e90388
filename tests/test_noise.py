"""The noise is random enough, and the same wherever it is made."""

import itertools
import math

import pytest
import torch

from ddtree.tree import noise
from ddtree.tree.noise import bits_to_gumbel, gumbel, gumbel_at, token_bits

WORD = 1 << 32
MASK = WORD - 1


def plain_bits(seed, position, token):
    """The published mixers in plain integers: SplitMix64's stream, and the two-round hash."""

    def mix64(z):
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    key = mix64((mix64(seed % 2**64) + (position + 1) * 0x9E3779B97F4A7C15) % 2**64)
    x = token ^ key & MASK
    x = (x ^ x >> 16) * 0x21F0AAAD & MASK
    x ^= key >> 32
    x = (x ^ x >> 15) * 0xD35A2D97 & MASK
    return x ^ x >> 15


def bits_of(seeds, positions, ids):
    """Unsigned bits [B, P, K] of every seed, position and id."""
    seeds, positions = torch.as_tensor(seeds), torch.as_tensor(positions)
    shape = (len(seeds), len(positions), len(ids))
    positions, ids = positions.expand(shape[:2]), torch.as_tensor(ids).expand(shape)
    return token_bits(seeds, positions, ids).long() & MASK


def assert_uniform(counts, deviations=5.0):
    """Chi-square of equally likely cells, within so many standard deviations of its mean."""
    cells = counts.numel()
    expected = counts.sum().double() / cells
    chi2 = float(((counts - expected) ** 2 / expected).sum())
    assert abs(chi2 - (cells - 1)) < deviations * math.sqrt(2 * (cells - 1)), chi2


def assert_independent(a, b, cells=16):
    """Joint and marginal uniformity of two equally shaped arrays of 32 bits: high and low bits."""
    for shift in (28, 0):
        x, y = (a >> shift) % cells, (b >> shift) % cells
        assert_uniform(torch.bincount((x * cells + y).flatten(), minlength=cells * cells))
    for bit in (1, 7, 16, 31):
        agree = ((a >> bit ^ b >> bit) & 1).double()
        assert abs(float(agree.mean()) - 0.5) * 2 * math.sqrt(agree.numel()) < 5


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 1234567])
def test_bits_are_the_published_mixers(seed):
    positions, ids = [0, 1, 7, 40959], [0, 1, 2, 49151, 151935, 2**31 - 1]
    got = bits_of([seed], positions, ids)[0].tolist()
    assert got == [[plain_bits(seed, p, token) for token in ids] for p in positions]


def test_bits_are_uniform():
    bits = bits_of([3, 4], list(range(4)), range(1 << 17))
    for shift in (24, 16, 8, 0):
        assert_uniform(torch.bincount(((bits >> shift) & 255).flatten(), minlength=256))
    for bit in range(32):
        ones = (bits >> bit & 1).double()
        assert abs(float(ones.mean()) - 0.5) * 2 * math.sqrt(ones.numel()) < 5


@pytest.mark.parametrize("what", ["id", "position", "seed"])
def test_every_input_bit_flips_every_output_bit_half_of_the_time(what):
    """Avalanche. Ids and positions of the sizes in use; all 64 bits of a seed."""
    count = 4096
    generator = torch.Generator().manual_seed(5)
    seeds = torch.randint(-(2**62), 2**62, (count,), generator=generator)
    positions = torch.randint(1 << 17, (count, 1), generator=generator)
    ids = torch.randint(1 << 18, (count, 1, 1), generator=generator)
    base = token_bits(seeds, positions, ids)
    for bit in range({"id": 18, "position": 17, "seed": 64}[what]):
        flip = 1 << bit if bit < 63 else -(1 << 63)
        other = token_bits(
            seeds ^ (flip if what == "seed" else 0),
            positions ^ (flip if what == "position" else 0),
            ids ^ (flip if what == "id" else 0),
        )
        changed = (base ^ other).flatten().long() & MASK
        rates = torch.stack([(changed >> out & 1).double().mean() for out in range(32)])
        worst = float((rates - 0.5).abs().max())
        # A fair coin strays 0.0078 per standard deviation here; the hash's own bias adds to ids'.
        assert worst < (0.06 if what == "id" else 0.045), (bit, worst)


def test_neighbours_are_independent():
    bits = bits_of(range(8), range(100, 116), range(4096))
    assert_independent(bits[:, :, :-1], bits[:, :, 1:])
    assert_independent(bits[:, :, :-2], bits[:, :, 2:])
    assert_independent(bits[:, :-1], bits[:, 1:])
    assert_independent(bits[:-1], bits[1:])
    # As in a sequence: seed s at position p + 1 beside seed s + 1 at position p.
    assert_independent(bits[:-1, 1:], bits[1:, :-1])


def test_positions_do_not_share_numbers():
    """Regression: with 32 bits of key only, keys of equal upper bits permute one sequence."""
    positions = list(range(1 << 14))
    sums = bits_of([0], positions, range(256))[0].sum(1)  # a permutation does not change it
    assert len(sums.unique()) == len(positions)


def test_maximum_over_a_vocabulary_is_gumbel():
    """argmax and max of V numbers: uniform, and Gumbel shifted by log V (mean and variance)."""
    vocab, rows = 1000, 4000
    noise = gumbel(torch.arange(rows // 8), torch.arange(8).expand(rows // 8, 8), 0, vocab)
    best, place = noise.flatten(0, 1).double().max(1)
    assert_uniform(torch.bincount(place // 20, minlength=50))
    euler, spread = 0.5772156649, math.pi / math.sqrt(6)
    assert abs(float(best.mean()) - math.log(vocab) - euler) < 5 * spread / math.sqrt(rows)
    assert abs(float(best.var()) / spread**2 - 1) < 5 * math.sqrt(4.4 / rows)


def test_extreme_tail_has_its_mass():
    """The largest of 150k numbers decides; coarse uniforms would tie or stop at 16.6."""
    vocab, positions = 150_000, torch.arange(60)
    noise = gumbel(torch.tensor([11]), positions[None], 0, vocab)[0].double()
    for tail in (1e-2, 1e-4, 1e-5):
        bound = -math.log(-math.log1p(-tail))
        found, expected = int((noise > bound).sum()), tail * noise.numel()
        assert abs(found - expected) < 5 * math.sqrt(expected), (tail, found, expected)
    # P(max of V > bound) = 1 %, in about 1 % of the many vocabularies of 150k that 9M numbers are.
    best = noise.max(1)[0] - math.log(vocab)
    cdf = torch.exp(-torch.exp(-best)).sort()[0]
    steps = torch.arange(1, 61).double() / 60
    assert float((cdf - steps).abs().max()) < 1.95 / math.sqrt(60)  # Kolmogorov-Smirnov, 0.1 %
    # The extreme 1 % of all numbers, as numbers: their excess over the bound is exponential.
    bound = -math.log(-math.log1p(-0.01))
    excess = noise[noise > bound] - bound
    assert abs(float(excess.mean()) - 1) < 5 / math.sqrt(len(excess)) + 0.005


def test_numbers_at_the_ends_of_the_bits():
    bits = torch.tensor([0, 1, 2**31 - 1, -(2**31), -2, -1], dtype=torch.int32)
    values = bits_to_gumbel(bits)
    assert values.isfinite().all()
    assert values.tolist() == sorted(values.tolist(), reverse=True)
    assert float(values[0]) == pytest.approx(33 * math.log(2), rel=1e-6)
    assert float(values[-1]) == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)
    unsigned = bits.double() + WORD * (bits < 0)
    exact = -(-(-(unsigned + 0.5) / WORD).clamp(min=-(1 - 2**-24)).log1p()).log()
    assert torch.allclose(values.double(), exact, rtol=0, atol=1e-6)


def test_numbers_are_the_formula():
    bits = (bits_of([8], [0], range(100_000))[0, 0] - 2**31).to(torch.int32)
    u = ((bits.double() + WORD * (bits < 0) + 0.5) / WORD).clamp(max=1 - 2**-24)
    exact = -(-(-u).log1p()).log()
    near_one = u > 0.999  # there u itself is rounded to steps of 2^-24
    error = (bits_to_gumbel(bits).double() - exact).abs()
    assert float(error[~near_one].max()) < 1e-5
    assert float(error.max()) < 0.05


def test_shards_and_chosen_tokens_get_the_same_numbers(monkeypatch):
    vocab = 30_011
    seeds, positions = torch.tensor([5, -9]), torch.tensor([[0, 1, 2], [50, 7, 4000]])
    whole = gumbel(seeds, positions, 0, vocab)
    assert whole.shape == (2, 3, vocab) and whole.dtype == torch.float32
    for cuts in ((0, 10_000, 20_000, vocab), (0, 1, 17, 15_006, vocab)):
        parts = [gumbel(seeds, positions, a, b - a) for a, b in itertools.pairwise(cuts)]
        assert torch.equal(torch.cat(parts, 2), whole)
    ids = torch.randint(vocab, (2, 3, 40), generator=torch.Generator().manual_seed(1))
    assert torch.equal(gumbel_at(seeds, positions, ids), whole.gather(2, ids))
    monkeypatch.setattr(noise, "_CPU_BLOCK", 1 << 30)
    assert torch.equal(gumbel(seeds, positions, 0, vocab), whole)
    for row in range(2):
        alone = gumbel(seeds[row : row + 1], positions[row : row + 1], 0, vocab)
        assert torch.equal(alone[0], whole[row])


def test_runs_on_meta():
    """Nothing asks the host for a value."""
    seeds = torch.empty(2, dtype=torch.int64, device="meta")
    positions = torch.empty(2, 3, dtype=torch.int64, device="meta")
    ids = torch.empty(2, 3, 4, dtype=torch.int64, device="meta")
    assert gumbel(seeds, positions, 5, 11).shape == (2, 3, 11)
    assert gumbel_at(seeds, positions, ids).shape == (2, 3, 4)
