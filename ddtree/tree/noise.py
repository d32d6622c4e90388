"""Counter-based Gumbel noise: one number per (seed, position, token), the same on every device."""

import torch
from torch import Tensor

# A token's 32 bits are `mix(id, key)`, the key's 64 bits being a function of seed and position.
#
# Keys: SplitMix64 (Steele, Lea & Flood, "Fast splittable pseudorandom number generators", OOPSLA
# 2014; output function: variant 13 of David Stafford's "Better bit mixing"), started from the mixed
# seed and jumped to the position. It is a bijection of the position, so a seed's keys are distinct,
# and keys of neighbouring positions or seeds have nothing in common.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX64 = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))
_MIX64_LAST = 31
# Bits: the two-round xorshift-multiply hash [16 21f0aaad 15 d35a2d97 15] of Chris Wellons'
# hash-prospector, the one of least avalanche bias (0.108) in its list. Half of the key goes in
# before the first round and half between the two, so that two keys with equal upper bits do not
# give the same numbers in another order.
_ROUND1 = (16, 0x21F0AAAD)
_ROUND2 = (15, 0xD35A2D97 - (1 << 32))
_LAST = 15

_LARGEST = 1.0 - 2.0**-24
_CPU_BLOCK = 1 << 16
"""Numbers made at once on CPU: they stay in the cache through the twenty operations."""


def gumbel(seeds: Tensor, positions: Tensor, first_id: int, count: int) -> Tensor:
    """Standard Gumbel noise for the tokens `first_id .. first_id + count - 1`.

    seeds:     [B] int64.
    positions: [B, P] int64, absolute position of the token to be chosen.

    Returns [B, P, count] float32, between -2.82 and 22.88. A shard of the vocabulary gets the same
    numbers as the whole. The 32 random bits behind a number are equal on all devices, the number
    itself within a few ulp: `u = (bits + 1/2) / 2^32`, at most 1 - 2^-24; `g = -log(-log1p(-u))`.
    Large values come from small u, where float32 resolves every one of the 2^32 bits.
    """
    low, high = _keys(seeds, positions)
    ids = torch.arange(first_id, first_id + count, dtype=torch.int32, device=seeds.device)
    out = torch.empty(low.shape[0], count, device=seeds.device)
    step = max(1, _CPU_BLOCK // max(1, count)) if out.device.type == "cpu" else low.shape[0]
    for block, key, more in zip(out.split(step), low.split(step), high.split(step), strict=True):
        _gumbel(_bits(ids ^ key, more), block)
    return out.view(*positions.shape, count)


def gumbel_at(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """As `gumbel`, for chosen tokens only.

    seeds:     [B] int64.
    positions: [B, P] int64.
    ids:       [B, P, K] integer.

    Returns [B, P, K] float32.
    """
    low, high = _keys(seeds, positions)
    bits = _bits(ids.flatten(0, 1).to(torch.int32) ^ low, high)
    return _gumbel(bits, torch.empty(bits.shape, device=bits.device)).view(ids.shape)


def token_bits(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """The random bits behind `gumbel_at`: [B, P, K] int32, to be read as unsigned."""
    low, high = _keys(seeds, positions)
    return _bits(ids.flatten(0, 1).to(torch.int32) ^ low, high).view(ids.shape)


def bits_to_gumbel(bits: Tensor) -> Tensor:
    """The Gumbel numbers of `bits [...]` int32, read as unsigned -> `[...]` float32."""
    return _gumbel(bits, torch.empty(bits.shape, device=bits.device))


def _keys(seeds: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The key of every (seed, position): its lower and upper halves, [B * P, 1] int32 each."""
    key = _mix64(_mix64(seeds).unsqueeze(1) + (positions + 1) * _GOLDEN).view(-1, 1)
    return key.to(torch.int32), (key >> 32).to(torch.int32)


def _mix64(z: Tensor) -> Tensor:
    for shift, factor in _MIX64:
        z = (z ^ _logical_shift64(z, shift)) * factor
    return z ^ _logical_shift64(z, _MIX64_LAST)


def _logical_shift64(z: Tensor, shift: int) -> Tensor:
    return (z >> shift) & ((1 << (64 - shift)) - 1)


def _bits(x: Tensor, key: Tensor) -> Tensor:
    """Mix `x [R, n]` int32 (token id, xor the key's lower half) with `key [R, 1]`, in place."""
    scratch = torch.empty_like(x)
    _xor_shift(x, _ROUND1[0], scratch).mul_(_ROUND1[1]).bitwise_xor_(key)
    _xor_shift(x, _ROUND2[0], scratch).mul_(_ROUND2[1])
    return _xor_shift(x, _LAST, scratch)


def _xor_shift(x: Tensor, shift: int, scratch: Tensor) -> Tensor:
    """`x ^= x >>> shift`: integers are signed here, so the sign's copies are masked away."""
    torch.bitwise_right_shift(x, shift, out=scratch)
    return x.bitwise_xor_(scratch.bitwise_and_((1 << (32 - shift)) - 1))


def _gumbel(bits: Tensor, out: Tensor) -> Tensor:
    out.copy_(bits.view(torch.uint32)).add_(0.5).mul_(-(2.0**-32)).clamp_(min=-_LARGEST)
    return out.log1p_().neg_().log_().neg_()
