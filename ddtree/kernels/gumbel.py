"""The noise of `ddtree.tree.noise` in Triton's language, for kernels to make where they need it."""

from __future__ import annotations

from ddtree.kernels.lazy import Arg, kernel, tl

# Constants and sources are in ddtree/tree/noise.py; the integers are the same, bit for bit.


@kernel
def _mix64(z: Arg) -> Arg:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return z ^ (z >> 31)


@kernel
def noise_key(seed: Arg, position: Arg) -> Arg:
    """The key of (seed, position), int64 both: its lower and upper halves, uint32 each."""
    start = _mix64(seed.to(tl.uint64, bitcast=True))
    step = (position + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    key = _mix64(start + step)
    return key.to(tl.uint32), (key >> 32).to(tl.uint32)


@kernel
def noise_bits(ids: Arg, low: Arg, high: Arg) -> Arg:
    """The 32 random bits of the tokens `ids` under a key."""
    x = ids.to(tl.uint32) ^ low
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = x ^ high
    x = (x ^ (x >> 15)) * 0xD35A2D97
    return x ^ (x >> 15)


@kernel
def gumbel(bits: Arg) -> Arg:
    """-log(-log1p(-u)) with u = (bits + 1/2) / 2^32, at most 1 - 2^-24."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994039535522)
    # log1p(-u) = log(w) * -u / (w - 1) with w = 1 - u rounded: what w lost cancels.
    w = 1.0 - u
    lost = w == 1.0
    exact = tl.log(w) * u / tl.where(lost, 1.0, 1.0 - w)
    return -tl.log(tl.where(lost, u, -exact))


@kernel
def sort_key(values: Arg) -> Arg:
    """Integers that sort like the float32 `values`: negative ones' lower bits are inverted."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@kernel
def key_value(key: Arg) -> Arg:
    """The float32 number whose `sort_key` is `key` int32."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@kernel
def pack(values: Arg, ids: Arg) -> Arg:
    """One int64 that sorts by value, then by smallest id: `key << 32 | ~id`. -0 counts as +0."""
    key = sort_key(values + 0.0).to(tl.int64) << 32
    return key | (0xFFFFFFFF - ids.to(tl.int64))
