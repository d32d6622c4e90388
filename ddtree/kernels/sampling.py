"""Sampling over the vocabulary: adjusted logits, filters, perturbed choice, candidates, logprobs.

The noise of a row comes in as `T * g`: `argmax(x / T + g)` is `argmax(x + T * g)`, which needs no
division, and is plain argmax at temperature 0. For the same reason filters are thresholds on the
logits before temperature. `V` is this shard's part of the vocabulary, from token `first_id` on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""Combines a tensor over the vocabulary's shards; the same tensor where there is one shard."""

COLDEST = 1e-4
"""Tree weights are tempered by no less: enough for a spine, and nothing overflows."""
LARGEST = torch.finfo(torch.float32).max
MASS_BITS = 40
"""The most likely token's probability mass in integers is 2^40: with 2^20 tokens int64 holds."""
RADIX = ((21, 11), (10, 11), (0, 10))
"""Passes of the threshold search over 32-bit keys: (bits below the digit, bits of the digit)."""


@dataclass
class Penalties:
    """What makes tokens less likely (or more) that were there before."""

    repetition: Tensor
    """[B] float32, 1 = none: divides positive logits of prompt and output tokens, and multiplies
    negative ones."""
    presence: Tensor
    """[B] float32, 0 = none: taken once from the logits of output tokens."""
    frequency: Tensor
    """[B] float32, 0 = none: taken for each time that a token is in the output."""
    output_counts: Tensor
    """[B, V] int32 how often each token is in the output, the anchor included."""
    prompt_seen: Tensor
    """[B, V] bool tokens of the prompt."""


@dataclass
class Adjustments:
    """What changes a row's logits before temperature; None is what no row of the step uses."""

    bias_ids: Tensor | None = None
    """[B, W] int64 distinct token ids, padded with -1."""
    bias_values: Tensor | None = None
    """[B, W] float32 numbers to add to their logits; of any value at padding."""
    stop_ids: Tensor | None = None
    """[B, S] int64 tokens that end the request, padded with -1."""
    min_end: Tensor | None = None
    """[B] int64: at positions before it no stop id is chosen (prompt length + min_new_tokens)."""
    penalties: Penalties | None = None


@dataclass
class Filters:
    """Temperature, and what cuts off unlikely tokens; None is what no row of the step uses."""

    temperature: Tensor
    """[B] float32, 0 = greedy."""
    top_k: Tensor | None = None
    """[B] int64, 0 = all: the k most likely tokens, and those that tie with the last of them."""
    top_p: Tensor | None = None
    """[B] float32, 1 = all: the fewest most likely tokens that have this share of what top-k left,
    and those that tie with the last of them."""
    min_p: Tensor | None = None
    """[B] float32, 0 = all: tokens at least so likely relative to the most likely one."""


def process_logits(
    logits: Tensor,
    positions: Tensor,
    paths: Tensor | None,
    adjustments: Adjustments,
    first_id: int = 0,
) -> Tensor:
    """Add the logit bias, mask stop ids, and apply penalties, in this order and in place.

    logits:    [B, N, V] float32, overwritten and returned.
    positions: [B, N] int64 absolute position of the token that each node chooses.
    paths:     [B, N, L] int64 tokens from each node up to the root, which is excluded (it is in
               the counts), padded with -1; None when no node is below a root.

    Penalties are those of vLLM: repetition over prompt and output, presence and frequency over the
    output, here with the node's own path.
    """
    _add_sparse(logits, positions, adjustments, first_id)
    p = adjustments.penalties
    if p is None:
        return logits
    if paths is not None:
        places, _ = _local(paths, first_id, logits.shape[2])
        before = logits.gather(2, places)

    counts, prompt = p.output_counts.unsqueeze(1), p.prompt_seen.unsqueeze(1)
    _penalise(logits, counts, prompt, p)
    if paths is not None:
        # Tokens of the path again, from their logits before, with the path's own counts added.
        # Padding stands for the shard's first token: what it writes is right for that one too.
        nodes = paths.shape[1]
        times = (paths.unsqueeze(2) == (places + first_id).unsqueeze(3)).sum(3, dtype=torch.int32)
        counts = counts.expand(-1, nodes, -1).gather(2, places) + times
        prompt = prompt.expand(-1, nodes, -1).gather(2, places)
        logits.scatter_(2, places, _penalise(before, counts, prompt, p))
    return logits


def filter_threshold(
    logits: Tensor, filters: Filters, all_sum: Reduce | None = None, all_max: Reduce | None = None
) -> Tensor:
    """Smallest logit that top-k, top-p and min-p keep, [B, N] float32; -inf when all are kept.

    logits: [B, N, V] float32, processed, before temperature.
    all_sum, all_max: reductions over the vocabulary's shards.

    top-k and top-p are exact, by radix selection (three passes) over keys that sort like the
    logits. Probability masses are added up as integers, so that the result does not depend on the
    order of the vocabulary or on its shards.
    """
    all_sum, all_max = all_sum or _alone, all_max or _alone
    temperature = _divisor(filters.temperature).unsqueeze(1)
    least = torch.full_like(logits[..., 0], -torch.inf)
    if filters.min_p is None and filters.top_p is None and filters.top_k is None:
        return least
    most = all_max(logits.amax(-1))
    if filters.top_k is not None or filters.top_p is not None:
        keys = _sort_keys(logits)
    if filters.top_k is not None:
        top_k = filters.top_k.unsqueeze(1)
        ones = torch.ones((), dtype=torch.int64, device=logits.device).expand(keys.shape)
        found = _select(keys, ones, top_k.expand_as(least), all_sum)
        least = torch.where(top_k > 0, found, least)
    if filters.top_p is not None:
        shifted = logits - most.unsqueeze(2)
        if filters.top_k is not None:
            _drop_below(shifted, logits, least)
        shifted.div_(temperature.unsqueeze(2)).exp_().mul_(2.0**MASS_BITS)
        mass = shifted.to(torch.int64)
        top_p = filters.top_p.unsqueeze(1)
        share = (all_sum(mass.sum(-1)).double() * top_p.double()).ceil_().to(torch.int64)
        found = _select(keys, mass, share.clamp_(min=1), all_sum)
        least = torch.where(top_p < 1, torch.maximum(least, found), least)
    if filters.min_p is not None:
        least = torch.maximum(least, most + temperature * filters.min_p.log().unsqueeze(1))
    return least


def filter_logits(
    logits: Tensor, filters: Filters, all_sum: Reduce | None = None, all_max: Reduce | None = None
) -> Tensor:
    """Move what the filters cut off in `logits [B, N, V]` to below -3e38, in place; see
    `filter_threshold`."""
    if filters.top_k is None and filters.top_p is None and filters.min_p is None:
        return logits
    least = filter_threshold(logits, filters, all_sum, all_max)
    return _drop_below(logits, logits, least)


def perturb_nodes(logits: Tensor, noise: Tensor, depths: Tensor) -> Tensor:
    """Add to each node's logits the noise of its depth; their argmax is the node's token.

    logits: [B, N, V] float32, filtered.
    noise:  [B, P, V] float32, T * g; of depth d in row d.
    depths: [B, N] int64, each less than P.

    Returns [B, N, V] float32.
    """
    batch, per_row, vocab = noise.shape
    first = torch.arange(batch, device=noise.device).unsqueeze(1) * per_row
    rows = noise.reshape(batch * per_row, vocab).index_select(0, (depths + first).view(-1))
    return rows.view(logits.shape).add_(logits)


def rank_candidates(
    logits: Tensor,
    temperature: Tensor,
    count: int,
    noise: Tensor | None = None,
    alpha: Tensor | None = None,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The drafter's candidates per depth, ids and tree weights [B, L, K], best first.

    logits:      [B, L, V] float32, the drafter's.
    temperature: [B] float32.
    count:       K.
    noise:       [B, L, V] float32, T * g of the positions that the candidates would have; None for
                 the plain tree.
    alpha:       [L] float32, trust in the drafter at each depth; only with noise.
    scale:       [L] float32, what perturbed scores are divided by; only with noise.

    Plain, and at temperature 0: the most likely tokens with their log-probabilities, tempered (by 1
    at temperature 0). Coupled: of the whole vocabulary the tokens with the largest `s = alpha *
    log q + g`, with `log_softmax(s / scale)` over them.
    """
    divisor = _divisor(temperature).clamp_(min=COLDEST)[:, None, None]
    if noise is None:
        values, ids = logits.topk(count, -1)
        return ids, values / divisor - (logits / divisor).logsumexp(-1, keepdim=True)

    assert alpha is not None and scale is not None
    scores, ids = torch.addcmul(noise, logits, alpha[:, None]).topk(count, -1)
    spread = (scores - scores[..., :1]) / (divisor * scale[:, None])
    coupled = spread.log_softmax(-1)
    greedy = logits.gather(2, ids) - logits.logsumexp(-1, keepdim=True)
    return ids, torch.where(temperature[:, None, None] > 0, coupled, greedy)


def token_logprobs(logits: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities under the raw distribution: of the chosen tokens, and of the best ones.

    logits: [..., V] float32, unprocessed.
    chosen: [...] int64.
    count:  n, how many of the most likely tokens to name.

    Returns logprobs [...] float32 of the chosen, ids [..., n] int64 and logprobs [..., n] float32
    of the most likely.
    """
    total = logits.logsumexp(-1, keepdim=True)
    values, ids = logits.topk(count, -1)
    return (logits.gather(-1, chosen.unsqueeze(-1)) - total).squeeze(-1), ids, values - total


def count_tokens(
    counts: Tensor, slots: Tensor, tokens: Tensor, kept: Tensor, first_id: int = 0
) -> None:
    """Count emitted tokens in `counts [R, V]` int32, in place.

    slots:  [B] int64 rows of `counts`.
    tokens: [B, D] int64.
    kept:   [B] int64, how many of a row's tokens count, from the first on.
    """
    order = torch.arange(tokens.shape[1], device=tokens.device)
    places, inside = _local(tokens, first_id, counts.shape[1])
    inside = inside & (order < kept.unsqueeze(1))
    places = places + slots.unsqueeze(1) * counts.shape[1]
    counts.view(-1).scatter_add_(0, places.view(-1), inside.view(-1).to(counts.dtype))


def note_prompt(seen: Tensor, slot: Tensor, tokens: Tensor, first_id: int = 0) -> None:
    """Mark a prompt's `tokens [1, n]` int64 in row `slot [1]` of `seen [R, V]` bool, in place."""
    places, inside = _local(tokens[0], first_id, seen.shape[1])
    found = torch.zeros_like(seen[0], dtype=torch.int32).scatter_add_(0, places, inside.int())
    seen.index_copy_(0, slot, seen.index_select(0, slot) | (found > 0))


def _add_sparse(logits: Tensor, positions: Tensor, a: Adjustments, first_id: int) -> None:
    """Add the bias, and -inf to stop ids that come too early.

    Both are added rather than stored: padding then adds 0 to some token, in any order.
    """
    for ids, values in ((a.bias_ids, a.bias_values), (a.stop_ids, a.min_end)):
        if ids is None:
            continue
        assert values is not None
        if ids is a.stop_ids:
            early = (positions < values.unsqueeze(1)).unsqueeze(2)
            amounts = torch.zeros_like(early, dtype=logits.dtype).masked_fill_(early, -torch.inf)
        else:
            amounts = values.unsqueeze(1)
        places, inside = _local(ids, first_id, logits.shape[2])
        shape = (*logits.shape[:2], ids.shape[1])
        amounts = torch.where(inside.unsqueeze(1), amounts, 0.0).expand(shape)
        logits.scatter_add_(2, places.unsqueeze(1).expand(shape), amounts)


def _local(ids: Tensor, first_id: int, size: int) -> tuple[Tensor, Tensor]:
    """Columns of token ids in this shard, 0 for those that are not in it; and which are."""
    columns = ids - first_id
    inside = (columns >= 0) & (columns < size) & (ids >= 0)
    return torch.where(inside, columns, 0), inside


# On CPU `where` and `masked_fill` cost ten times what float arithmetic does; a comparison can write
# floats at once.


def _penalise(x: Tensor, counts: Tensor, prompt: Tensor, p: Penalties) -> Tensor:
    """Apply all penalties to `x [B, N, n]` in place; counts and prompt are [B, N or 1, n]."""
    repetition, presence, frequency = (
        value[:, None, None] for value in (p.repetition, p.presence, p.frequency)
    )
    present = torch.gt(counts, 0, out=torch.empty_like(counts, dtype=x.dtype))
    factor = torch.maximum(present, prompt.to(x.dtype)).mul_(repetition - 1).add_(1)
    loss = present.mul_(presence).add_(counts * frequency)
    negative = x.clamp(max=0).mul_(factor)
    return x.clamp_(min=0).div_(factor).add_(negative).sub_(loss)


def _drop_below(x: Tensor, values: Tensor, least: Tensor) -> Tensor:
    """Take float32's largest number from `x [B, N, V]`, in place, where `values < least [B, N]`."""
    below = torch.lt(values, least.unsqueeze(2), out=torch.empty_like(x))
    return x.sub_(below, alpha=LARGEST)


def _divisor(temperature: Tensor) -> Tensor:
    return torch.where(temperature > 0, temperature, 1.0)


def _alone(x: Tensor) -> Tensor:
    return x


def _sort_keys(values: Tensor) -> Tensor:
    """Integers that sort like the float32 `values`: negative ones' lower bits are inverted."""
    bits = values.view(torch.int32)
    return (bits >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits)


def _select(keys: Tensor, mass: Tensor, wanted: Tensor, all_sum: Reduce) -> Tensor:
    """Largest value at or above which there is the mass `wanted`, [B, N] float32.

    keys:   [B, N, V] int32, sort keys of the values.
    mass:   [B, N, V] int64.
    wanted: [B, N] int64; more than there is means all.

    Each pass finds one digit of the answer's key, from a histogram of the mass over the keys that
    begin like it; those below and above go to the outermost bins.
    """
    batch, nodes, _ = keys.shape
    wanted = wanted.unsqueeze(2)
    digits, places = torch.empty_like(keys), torch.empty_like(keys, dtype=torch.int64)
    found = torch.zeros_like(wanted)
    for shift, bits in RADIX:
        bins = 1 << bits
        # Keys are signed, so the first digit is too.
        first = found - bins // 2 if shift + bits == 32 else found << bits
        below, above = (first - 1).to(torch.int32), (first + bins).to(torch.int32)
        torch.bitwise_right_shift(keys, shift, out=digits)
        places.copy_(torch.clamp(digits, below, above, out=digits).sub_(below))
        table = torch.zeros(batch, nodes, bins + 2, dtype=torch.int64, device=keys.device)
        table = all_sum(table.scatter_add_(2, places, mass))
        at_least = table.flip(2).cumsum(2).flip(2)[..., 1:-1]
        wanted = torch.minimum(wanted, at_least[..., :1])
        found = first + (at_least >= wanted).sum(2, keepdim=True) - 1
    key = found.squeeze(2).to(torch.int32)
    return (key >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(key).view(torch.float32)
