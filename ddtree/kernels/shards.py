"""A vocabulary in shards: what a rank says about its part of the logits, and what follows from all.

Choices travel as one integer, candidates as a few: `sort key << 32 | ~token`, whose order is that
of the scores, and of the smallest id where they are equal. Full logits never travel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ddtree.kernels.sampling import COLDEST, _sort_keys

LOW = 0xFFFFFFFF
LOWEST = -(1 << 63)
"""Below every packed choice."""


def pack_choices(values: Tensor, ids: Tensor) -> Tensor:
    """One int64 for each value (float32) and token id, of the same shape. -0 counts as +0."""
    return (_sort_keys(values + 0.0).long() << 32) | (LOW - ids)


def chosen_ids(packed: Tensor) -> Tensor:
    """The token ids of packed choices."""
    return LOW - (packed & LOW)


def chosen_values(packed: Tensor) -> Tensor:
    """The float32 values of packed choices."""
    key = (packed >> 32).to(torch.int32)
    return ((key >> 31).bitwise_and_(0x7FFFFFFF) ^ key).view(torch.float32)


def local_candidates(
    logits: Tensor,
    temperature: Tensor | None,
    count: int,
    first_id: int,
    noise: Tensor | None = None,
    alpha: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The best candidates of a shard `logits [B, L, V]`, from token `first_id` on.

    The other arguments are those of `sampling.rank_candidates`.

    Returns packed choices by score [B, L, k] int64 with k = min(count, V), their logits [B, L, k]
    float32, and the log-sum-exp [B, L] of the shard's logits: tempered without noise, plain with.
    """
    count = min(count, logits.shape[2])
    scores = logits
    if noise is not None:
        assert alpha is not None
        scores = torch.addcmul(noise, logits, alpha[:, None])
    values, ids = scores.topk(count, -1)
    tempered = logits
    if noise is None and temperature is not None:
        tempered = logits / _divisor(temperature)
    packed = pack_choices(values, ids + first_id)
    return packed, logits.gather(2, ids), tempered.logsumexp(-1)


def pack_candidates(packed: Tensor, logits: Tensor, total: Tensor, count: int) -> Tensor:
    """What `local_candidates` returns as one tensor [B, L, 2 * count + 1] int64, padded."""
    missing = count - packed.shape[2]
    pad = torch.nn.functional.pad
    packed, logits = pad(packed, (0, missing), value=LOWEST), pad(logits, (0, missing))
    return torch.cat((packed, _bits(logits), _bits(total[..., None])), 2)


def merge_candidates(
    gathered: Tensor,
    temperature: Tensor | None,
    count: int,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`sampling.rank_candidates` from all shards' `pack_candidates`, [R, B, L, 2 * k + 1].

    temperature: [B] float32; None: 1.
    count: K, at most the vocabulary and R * k.
    scale: [L] float32 with noise; None without.

    Returns ids [B, L, K] int64 and weights [B, L, K] float32, best first.
    """
    width = (gathered.shape[-1] - 1) // 2
    packed, logits, total = gathered.split((width, width, 1), -1)
    packed, place = packed.movedim(0, 2).flatten(2).topk(count, -1)
    logits = _floats(logits.movedim(0, 2).flatten(2).gather(2, place))
    total = _floats(total.movedim(0, 2).flatten(2)).logsumexp(-1, keepdim=True)
    ids = chosen_ids(packed)
    if scale is None:
        divisor = 1.0 if temperature is None else _divisor(temperature)
        return ids, logits / divisor - total
    assert temperature is not None
    scores = chosen_values(packed)
    spread = (scores - scores[..., :1]) / (_divisor(temperature) * scale[:, None])
    coupled = spread.log_softmax(-1)
    return ids, torch.where(temperature[:, None, None] > 0, coupled, logits - total)


def local_logprobs(logits: Tensor, chosen: Tensor, count: int, first_id: int, width: int) -> Tensor:
    """A shard's part of `sampling.token_logprobs`, [..., width + 2] int64 to be gathered.

    width: columns for the most likely tokens, the same for all shards, at least `count`.
    """
    values, ids = logits.topk(min(count, logits.shape[-1]), -1)
    best = pack_choices(values, ids + first_id)
    best = torch.nn.functional.pad(best, (0, width - best.shape[-1]), value=LOWEST)
    local = (chosen - first_id).unsqueeze(-1)
    inside = (local >= 0) & (local < logits.shape[-1])
    own = logits.gather(-1, torch.where(inside, local, 0))
    own = torch.where(inside, own, -torch.inf)
    total = logits.logsumexp(-1, keepdim=True)
    return torch.cat((best, _bits(own), _bits(total)), -1)


def merge_logprobs(gathered: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """`sampling.token_logprobs` from all shards' `local_logprobs`, [R, ..., width + 2]."""
    best, own, total = gathered.split((gathered.shape[-1] - 2, 1, 1), -1)
    total = _floats(total).logsumexp(0)
    best = best.movedim(0, -2).flatten(-2).topk(count, -1).values
    return (_floats(own).amax(0) - total).squeeze(-1), chosen_ids(best), chosen_values(best) - total


def _divisor(temperature: Tensor) -> Tensor:
    return torch.where(temperature > 0, temperature, 1.0).clamp(min=COLDEST)[:, None, None]


def _bits(values: Tensor) -> Tensor:
    return values.float().contiguous().view(torch.int32).long()


def _floats(bits: Tensor) -> Tensor:
    return bits.to(torch.int32).view(torch.float32)
