"""From shards to training batches: which sequences, which anchors, which labels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .data import Sequence, is_heldout, read_shard, tokens_mark
from .features import open_features


@dataclass(frozen=True)
class Item:
    """One corpus sequence and its features, bfloat16 `[n, (M + 1) * H]`."""

    sequence: Sequence
    rows: Tensor
    hidden_size: int


@dataclass(frozen=True)
class Batch:
    """`B` sequences padded to `S` tokens, each with `A` anchor blocks of `P = L + 1` rows."""

    features: Tensor  # [B, S, M*H] float32
    blocks: Tensor  # [B, A, P] int64: [anchor, mask x L]
    positions: Tensor  # [B, A, P] int64
    labels: Tensor  # [B, A, L] int64
    teacher: Tensor  # [B, A, L, H] float32: the target state that chose each label
    weights: Tensor  # [B, A, L] float32; 0 past the end of a sequence
    greedy: Tensor  # [B] bool

    def to(self, device: torch.device) -> Batch:
        """The same batch on `device`."""
        return Batch(*(getattr(self, item.name).to(device) for item in fields(self)))


class Store:
    """Every readable shard that has features, split into training and held-out items."""

    def __init__(
        self,
        work: Path,
        taps: tuple[int, ...],
        fingerprint: int,
        warn: Callable[[str], object] = print,
    ) -> None:
        self.work, self.taps, self.fingerprint, self.warn = work, taps, fingerprint, warn
        self.train: dict[str, list[Item]] = {}
        self.heldout: dict[str, list[Item]] = {}
        self._refused: set[str] = set()

    def refresh(self) -> list[str]:
        """Open what has appeared since; a damaged shard is named once and skipped.

        Returns:
            the names of the shards that training can use, sorted.
        """
        for about in sorted((self.work / "features").glob("*.json")):
            name = about.stem
            if name.startswith(".") or name in self.train or name in self._refused:
                continue
            try:
                self._open(name)
            except ValueError as error:
                self._refused.add(name)
                self.warn(f"skipped: {error}")
        return sorted(self.train)

    def _open(self, name: str) -> None:
        sequences = read_shard(self.work / "corpus" / f"{name}.npz", self.fingerprint)
        path = self.work / "features" / f"{name}.bin"
        rows = open_features(path, self.taps, self.fingerprint, tokens_mark(sequences))
        if rows.shape[0] != sum(len(s.tokens) for s in sequences):
            raise ValueError(f"feature shard {path} does not fit its corpus shard")
        bounds = np.cumsum([0, *(len(s.tokens) for s in sequences)])
        size = rows.shape[1] // (len(self.taps) + 1)
        items = [Item(s, rows[bounds[i] : bounds[i + 1]], size) for i, s in enumerate(sequences)]
        self.train[name] = [item for item in items if not is_heldout(item.sequence.prompt)]
        self.heldout[name] = [item for item in items if is_heldout(item.sequence.prompt)]


def token_counts(items: list[Item], vocab_size: int) -> Tensor:
    """How often each token occurs in the answers: int64 `[V]`."""
    answers = [np.zeros(0, np.int64), *(item.sequence.answer for item in items)]
    return torch.from_numpy(np.bincount(np.concatenate(answers), minlength=vocab_size))


def epoch_plan(
    items: list[Item], per_batch: int, generator: torch.Generator, chunk: int = 16
) -> list[list[int]]:
    """A random order of item indices in batches of similar length; the last partial one is left."""
    order = torch.randperm(len(items), generator=generator).tolist()
    batches = []
    for first in range(0, len(order), per_batch * chunk):
        part = sorted(
            order[first : first + per_batch * chunk], key=lambda i: len(items[i].sequence.tokens)
        )
        batches += [part[i : i + per_batch] for i in range(0, len(part) - per_batch + 1, per_batch)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def make_batch(
    items: list[Item],
    anchors: list[Tensor],
    block_size: int,
    mask_token: int,
    depth_weights: Tensor,
) -> Batch:
    """Pad `items` together and lay out the blocks at the given anchor positions (one 1-D tensor
    per item; fewer than the longest are filled up with blocks of weight 0)."""
    depth, count = block_size - 1, max(len(a) for a in anchors)
    length = max(len(item.sequence.tokens) for item in items)
    width = items[0].rows.shape[1]
    taps_width = width - items[0].hidden_size
    features = torch.zeros(len(items), length, taps_width)
    blocks = torch.full((len(items), count, block_size), mask_token)
    positions = torch.zeros(len(items), count, block_size, dtype=torch.int64)
    labels = torch.zeros(len(items), count, depth, dtype=torch.int64)
    teacher = torch.zeros(len(items), count, depth, width - taps_width)
    weights = torch.zeros(len(items), count, depth)
    for b, (item, at) in enumerate(zip(items, anchors, strict=True)):
        tokens = torch.from_numpy(item.sequence.tokens)
        n, used = len(tokens), len(at)
        features[b, :n] = item.rows[:, :taps_width]
        blocks[b, :used, 0] = tokens[at]
        positions[b, :used] = at[:, None] + torch.arange(block_size)
        positions[b, used:] = torch.arange(block_size)
        target = at[:, None] + torch.arange(1, block_size)
        weights[b, :used] = (target < n) * depth_weights
        target = target.clamp_max(n - 1)
        labels[b, :used] = tokens[target]
        teacher[b, :used] = item.rows[target - 1, taps_width:].float()
    greedy = torch.tensor([item.sequence.temperature == 0 for item in items])
    return Batch(features, blocks, positions, labels, teacher, weights, greedy)


def random_anchors(item: Item, count: int, generator: torch.Generator) -> Tensor:
    """Up to `count` distinct anchor positions, each with at least one answer token after it."""
    first, last = item.sequence.start, len(item.sequence.tokens) - 1
    return first + torch.randperm(last - first, generator=generator)[:count]


def walks(items: list[Item], limit: int) -> Iterator[tuple[Item, Tensor]]:
    """Greedy held-out items with every anchor of their first `limit` answer tokens."""
    for item in items:
        first = item.sequence.start
        last = min(len(item.sequence.tokens) - 1, first + limit)
        if item.sequence.temperature == 0 and last > first:
            yield item, torch.arange(first, last)
