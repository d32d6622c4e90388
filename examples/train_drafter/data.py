"""The corpus on disk: shards of token sequences, what is filtered out of them, and the split.

A shard `NAME.npz` holds `tokens` (all sequences end to end), `offsets` (int64, n + 1),
`response_start` (int32, first answer token within its sequence) and `temperature` (float16,
0 = greedy). Text is never kept; the target's features are recomputed from the ids.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HELDOUT_PERMILLE = 25


@dataclass(frozen=True)
class Sequence:
    """One conversation turn: prompt and answer token ids `[n]`, the answer from `start` on."""

    tokens: np.ndarray
    start: int
    temperature: float

    @property
    def prompt(self) -> np.ndarray:
        return self.tokens[: self.start]

    @property
    def answer(self) -> np.ndarray:
        return self.tokens[self.start :]


def is_heldout(prompt: np.ndarray) -> bool:
    """The split is a hash of the prompt: the same in every shard, run and order of generation."""
    return zlib.crc32(np.asarray(prompt, dtype=np.int64).tobytes()) % 1000 < HELDOUT_PERMILLE


def cut_loop(answer: np.ndarray, ngram: int = 8, allowed: int = 4) -> np.ndarray:
    """Cut an answer just before an `ngram` occurs for the `allowed + 1`-th time.

    Loops are cheap to predict and would drown everything else; a few repetitions stay in, because
    a drafter should know how to copy.
    """
    seen: Counter[bytes] = Counter()
    flat = np.ascontiguousarray(answer, dtype=np.int64)
    for end in range(ngram, len(flat) + 1):
        key = flat[end - ngram : end].tobytes()
        seen[key] += 1
        if seen[key] > allowed:
            return answer[: end - 1]
    return answer


class Filter:
    """Drops duplicate and very short sequences and cuts loops; keeps counts of what it did."""

    def __init__(self, min_answer: int = 12) -> None:
        self.min_answer = min_answer
        self.counts: Counter[str] = Counter()
        self._seen: set[int] = set()

    def __call__(self, sequence: Sequence) -> Sequence | None:
        answer = cut_loop(sequence.answer)
        if len(answer) < len(sequence.answer):
            self.counts["loops cut"] += 1
        if len(answer) < self.min_answer:
            self.counts["too short"] += 1
            return None
        key = hash(answer[:64].astype(np.int64).tobytes())
        if key in self._seen:
            self.counts["duplicates"] += 1
            return None
        self._seen.add(key)
        self.counts["kept"] += 1
        self.counts["answer tokens"] += len(answer)
        tokens = np.concatenate([sequence.prompt, answer])
        return Sequence(tokens, sequence.start, sequence.temperature)

    def remember(self, sequences: Iterable[Sequence]) -> None:
        """Know what earlier shards hold, so that a resumed job makes no duplicate of it."""
        for sequence in sequences:
            self._seen.add(hash(sequence.answer[:64].astype(np.int64).tobytes()))


def write_shard(path: Path, sequences: list[Sequence]) -> None:
    """Write a shard atomically: a killed job leaves the whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lengths = [len(s.tokens) for s in sequences]
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "wb") as file:
        np.savez_compressed(
            file,
            tokens=np.concatenate([s.tokens for s in sequences]).astype(np.int32),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            response_start=np.array([s.start for s in sequences], np.int32),
            temperature=np.array([s.temperature for s in sequences], np.float16),
        )
    os.replace(temporary, path)


def read_shard(path: Path) -> list[Sequence]:
    """Read a shard. A damaged one raises `ValueError` naming the file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            tokens, offsets = file["tokens"].astype(np.int64), file["offsets"]
            starts, temperatures = file["response_start"], file["temperature"]
    except Exception as error:  # zipfile, zlib, numpy and OS errors all mean the same thing here
        raise ValueError(f"corpus shard {path} is damaged: {error}") from error
    if not (len(offsets) == len(starts) + 1 == len(temperatures) + 1 and offsets[0] == 0):
        raise ValueError(f"corpus shard {path} is damaged: its arrays disagree in length")
    if offsets[-1] != len(tokens) or (np.diff(offsets) <= starts).any() or (starts < 1).any():
        raise ValueError(f"corpus shard {path} is damaged: offsets do not fit the tokens")
    return [
        Sequence(tokens[offsets[i] : offsets[i + 1]], int(starts[i]), float(temperatures[i]))
        for i in range(len(starts))
    ]


def shard_paths(work: Path) -> list[Path]:
    """All corpus shards of a work folder, in name order."""
    return sorted((work / "corpus").glob("*.npz"))


def readable_shards(work: Path, warn=print) -> Iterator[tuple[str, list[Sequence]]]:
    """`(name, sequences)` of every shard that can be read; a damaged one is named and skipped."""
    for path in shard_paths(work):
        try:
            yield path.stem, read_shard(path)
        except ValueError as error:
            warn(f"skipped: {error}")


def count_answers(work: Path, vocab_size: int, warn=print) -> tuple[np.ndarray, np.ndarray]:
    """How often each token is in the answers: `[V]` of the training ones, `[V]` of those held out.

    Raises:
        ValueError: an answer has tokens beyond the vocabulary: it is another target's corpus.
    """
    train, heldout = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    for name, sequences in readable_shards(work, warn):
        for sequence in sequences:
            answer = sequence.answer
            if len(answer) and not 0 <= answer.min() <= answer.max() < vocab_size:
                raise ValueError(f"corpus: {name} has tokens beyond the vocabulary of {vocab_size}")
            counts = heldout if is_heldout(sequence.prompt) else train
            np.add.at(counts, answer, 1)
    return train, heldout


def import_corpus(source: Path, work: Path, shard_tokens: int = 32768, seed: int = 0) -> Counter:
    """Cut an existing corpus file into filtered, shuffled shards, the held-out ones first."""
    keep = Filter()
    kept = [s for s in map(keep, read_shard(source)) if s is not None]
    order = np.random.default_rng(seed).permutation(len(kept))
    kept = [kept[i] for i in order]
    heldout = [s for s in kept if is_heldout(s.prompt)]
    rest = [s for s in kept if not is_heldout(s.prompt)]
    keep.counts["held out"] = len(heldout)
    if heldout:
        write_shard(work / "corpus" / f"{source.stem}-0000.npz", heldout)
    index, shard, size = 1, [], 0
    for sequence in rest:
        shard.append(sequence)
        size += len(sequence.tokens)
        if size >= shard_tokens or sequence is rest[-1]:
            write_shard(work / "corpus" / f"{source.stem}-{index:04d}.npz", shard)
            index, shard, size = index + 1, [], 0
    keep.counts["shards"] = index - 1 + bool(heldout)
    return keep.counts
