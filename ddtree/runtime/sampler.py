"""From hidden states to chosen tokens, in row chunks so that logits never fill the memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree.config import Calibration
from ddtree.kernels.sampling import (
    Adjustments,
    Filters,
    filter_logits,
    perturb_nodes,
    process_logits,
)
from ddtree.runtime.plan import TOP_LOGPROBS
from ddtree.runtime.vocabulary import Vocabulary
from ddtree.tree.build import Tree
from ddtree.tree.noise import gumbel

CHUNK_LOGITS = 1 << 25
"""Logits held at once: 128 MiB in float32."""
CPU_BLOCK_LOGITS = 1 << 18
"""Logits filtered and perturbed at once on CPU: with the integers that go with them they stay in
the cache. Elsewhere it is an eighth of a chunk, which those integers then fill again; kernels that
make the noise while they choose need no such room."""


@dataclass
class Sampling:
    """Sampling parameters of the B rows of a step.

    What no row of the step uses is None: that much is decided by the plan, never by the data, and
    a row's tokens do not depend on it.
    """

    filters: Filters
    adjustments: Adjustments | None = None


@dataclass(frozen=True)
class TreeWeights:
    """How candidates become weights of a tree: a drafter's calibration, `[L]` float32 each."""

    alpha: Tensor
    scale: Tensor
    log_hit: Tensor | None = None
    """None, as what follows: not calibrated."""
    greedy_scale: Tensor | None = None
    greedy_log_hit: Tensor | None = None

    @classmethod
    def make(cls, values: Calibration | None, depth: int, device: torch.device) -> TreeWeights:
        """Put `values` on `device`; without any, numbers that do for any drafter."""
        if values is None:
            ones = torch.ones(depth, device=device)
            return cls(alpha=ones, scale=2.0 * ones)
        names = ("alpha", "scale", "hit", "greedy_scale", "greedy_hit")
        alpha, scale, hit, greedy_scale, greedy_hit = (
            torch.tensor(getattr(values, name), dtype=torch.float32, device=device)
            for name in names
        )
        return cls(alpha, scale, hit.log(), greedy_scale, greedy_hit.log())

    def sampled(self, weights: Tensor) -> Tensor:
        """Log-probabilities among the candidates `[B, L, K]` -> of being right."""
        if self.log_hit is None:
            return weights
        return weights + self.log_hit[: weights.shape[1], None]

    def greedy(self, log_q: Tensor) -> Tensor:
        """The drafter's log-probabilities `[B, L, K]` -> those of being right, at temperature 0."""
        if self.greedy_scale is None or self.greedy_log_hit is None:
            return log_q
        depth = log_q.shape[1]
        scaled = (log_q / self.greedy_scale[:depth, None]).log_softmax(-1)
        return scaled + self.greedy_log_hit[:depth, None]


def choose(vocab: Vocabulary, hidden: Tensor) -> Tensor:
    """The target's token after every position of `hidden [B, T, H]` -> `[B, T]` int64."""
    batch, tokens, _ = hidden.shape
    rows = hidden.reshape(batch * tokens, -1)
    step = max(1, CHUNK_LOGITS // vocab.widest)
    parts = [vocab.choice(vocab.logits(part)) for part in rows.split(step)]
    return vocab.agree(parts).view(batch, tokens)


def scaled_noise(
    seeds: Tensor,
    temperature: Tensor,
    length: Tensor,
    count: int,
    vocab_size: int,
    first_id: int = 0,
) -> Tensor:
    """Noise of the `count` positions after `length`, times the temperature: [B, P, V] float32.

    seeds, length: [B] int64.
    temperature:   [B] float32; a greedy row's noise is 0.
    count:         P: L + 1 for a round, of which candidates use the first L; 1 after a prefill of
                   `length + 1` tokens.
    vocab_size:    V: this rank's tokens, from `first_id` on.

    Row d belongs to position `length + d + 1`: to the token that a node at depth d chooses, and to
    the candidates at depth d + 1. One evaluation serves both.
    """
    order = torch.arange(1, count + 1, device=length.device)
    noise = gumbel(seeds, length.unsqueeze(1) + order, first_id, vocab_size)
    return noise.mul_(temperature[:, None, None])


def choose_nodes(
    vocab: Vocabulary,
    hidden: Tensor,
    noise: Tensor | None,
    sampling: Sampling,
    depths: Tensor,
    positions: Tensor,
    paths: Tensor | None = None,
    seeds: Tensor | None = None,
) -> Tensor:
    """The target's sampled token after every node of `hidden [B, N, H]` -> `[B, N]` int64.

    noise:     [B, P, V] float32, see `scaled_noise`; None when all rows are greedy, or with seeds.
    depths:    [B, N] int64, each less than P.
    positions: [B, N] int64 absolute position of the token that a node chooses: one more than its
               own.
    paths:     [B, N, L] int64, see `path_tokens`; needed with penalties only.
    seeds:     [B] int64, for kernel sets that make the noise while they choose.

    A row at temperature 0 gets what `choose` gives, except for its own adjustments.
    """
    batch, nodes, _ = hidden.shape
    block = CPU_BLOCK_LOGITS if hidden.device.type == "cpu" else CHUNK_LOGITS // 8
    if seeds is not None and sampling.adjustments is None:
        block = CHUNK_LOGITS
    parts = []
    # All ranks go by the widest shard: they must cut, and speak, alike.
    for outer in _blocks(batch, nodes, vocab.widest, CHUNK_LOGITS):
        chunk = vocab.logits(hidden[outer])
        for inner in _blocks(chunk.shape[0], chunk.shape[1], vocab.widest, block):
            rows, columns = (_inside(whole, part) for whole, part in zip(outer, inner, strict=True))
            part, logits = _take_rows(sampling, rows), chunk[inner]
            if part.adjustments is not None:
                path = None if paths is None else paths[rows, columns]
                places = positions[rows, columns]
                process_logits(logits, places, path, part.adjustments, vocab.first)
            if noise is not None:
                filter_logits(logits, part.filters, *vocab.reducers)
                logits = perturb_nodes(logits, noise[rows], depths[rows, columns])
            if seeds is None:
                tokens = vocab.choice(logits)
            else:
                places = positions[rows, columns]
                tokens = vocab.choice(logits, part.filters, seeds[rows], places)
            parts.append(tokens.view(-1))
    return vocab.agree(parts).view(batch, nodes)


def path_tokens(tree: Tree, max_depth: int) -> Tensor:
    """Tokens from each node up to the root, without the root's, padded with -1: [B, N, L] int64."""
    names = tree.tokens.clone()
    names[:, 0].fill_(-1)
    node = torch.arange(names.shape[1], device=names.device).expand_as(names)
    tokens = []
    for _ in range(max_depth):
        tokens.append(names.gather(1, node))
        node = tree.parents.gather(1, node)
    return torch.stack(tokens, 2)


def path_logprobs(
    vocab: Vocabulary, hidden: Tensor, chosen: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities along the accepted path, under the target's raw distribution.

    hidden: [B, D, H] hidden states of the path's nodes.
    chosen: [B, D] int64 tokens chosen after them.
    count:  n, how many of the most likely tokens to name as well.

    Returns logprobs [B, D] of the chosen, and ids and logprobs [B, D, n] of the most likely. Logits
    are computed again for these rows: keeping those of all nodes would cost more memory than that.
    """
    batch, length, _ = hidden.shape
    step = max(1, CHUNK_LOGITS // vocab.widest)
    rows = zip(hidden.flatten(0, 1).split(step), chosen.flatten().split(step), strict=True)
    parts = [vocab.token_logprobs(vocab.logits(x), tokens, count) for x, tokens in rows]
    own, ids, best = (torch.cat(part) for part in zip(*parts, strict=True))
    shape = (batch, length, count)
    return own.view(batch, length), ids.view(shape), best.view(shape)


def pack_logprobs(vocab: Vocabulary, hidden: Tensor, chosen: Tensor) -> Tensor:
    """As `path_logprobs`, as a report has them: [B, D * LOGPROB_WIDTH] int64."""
    known = min(TOP_LOGPROBS, vocab.total)
    own, ids, best = path_logprobs(vocab, hidden, chosen, known)
    values = torch.cat((own.unsqueeze(2), F.pad(best, (0, TOP_LOGPROBS - known))), 2)
    ids = F.pad(ids, (0, TOP_LOGPROBS - known), value=-1)
    return torch.cat((values.view(torch.int32).long(), ids), 2).flatten(1)


def _blocks(batch: int, nodes: int, vocab: int, limit: int) -> Iterator[tuple[slice, slice]]:
    """Divide [B, N] into blocks of at most `limit / V` nodes: whole rows, or parts of one."""
    room = max(1, limit // vocab)
    for row in range(0, batch, max(1, room // nodes)):
        rows = slice(row, min(batch, row + max(1, room // nodes)))
        for node in range(0, nodes, room):
            yield rows, slice(node, min(nodes, node + room))


def _inside(whole: slice, part: slice) -> slice:
    return slice(whole.start + part.start, whole.start + part.stop)


def _take_rows(sampling: Sampling, rows: slice) -> Sampling:
    """The parameters of some rows: all tensors, at whatever level, are cut alike."""

    def cut(value: Any) -> Any:
        if is_dataclass(value) and not isinstance(value, type):
            return replace(value, **{f.name: cut(getattr(value, f.name)) for f in fields(value)})
        return value[rows] if isinstance(value, Tensor) else value

    return cut(sampling)
