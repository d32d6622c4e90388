"""The corpus on disk: shards of token sequences, what is filtered out of them, and the split.

A shard `NAME.npz` holds `tokens` (all sequences end to end), `offsets` (int64, n + 1),
`response_start` (int32, first answer token within its sequence) and `temperature` (float16,
0 = greedy); `target` (int64) is the fingerprint of the target that it is for, and files of others
need not have it. Text is never kept; the target's features are recomputed from the ids.
"""

from __future__ import annotations

import os
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HELDOUT_PERMILLE = 25
ARRAYS = {
    "tokens": ("iu", "integers"),
    "offsets": ("iu", "integers"),
    "response_start": ("iu", "integers"),
    "temperature": ("iuf", "numbers"),
}
"""What a shard must hold, each a row of the given dtype kinds."""


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


def write_shard(path: Path, sequences: list[Sequence], fingerprint: int | None = None) -> None:
    """Write a shard, for the target of that fingerprint, atomically: a killed job leaves the whole
    file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lengths = [len(s.tokens) for s in sequences]
    made_for = {} if fingerprint is None else {"target": np.int64(fingerprint)}
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "wb") as file:
        np.savez_compressed(
            file,
            tokens=np.concatenate([s.tokens for s in sequences]).astype(np.int32),
            offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            response_start=np.array([s.start for s in sequences], np.int32),
            temperature=np.array([s.temperature for s in sequences], np.float16),
            **made_for,
        )
    os.replace(temporary, path)


def read_shard(
    path: Path, fingerprint: int | None = None, vocab_size: int | None = None
) -> list[Sequence]:
    """Read a shard.

    Args:
        fingerprint: the target that it must be for, if it says for which it is; None for any.
        vocab_size: what all its tokens must be below; None for no such limit.

    Raises:
        ValueError: it is damaged, or for another target; the file is named.
    """
    arrays, made_for = _read_arrays(path)
    tokens, offsets, starts, temperatures = (arrays[name] for name in ARRAYS)
    if not (len(offsets) == len(starts) + 1 == len(temperatures) + 1 and offsets[0] == 0):
        raise ValueError(f"corpus shard {path} is damaged: its arrays disagree in length")
    if offsets[-1] != len(tokens) or (np.diff(offsets) <= starts).any() or (starts < 1).any():
        raise ValueError(f"corpus shard {path} is damaged: offsets do not fit the tokens")
    if not len(starts):
        raise ValueError(f"corpus shard {path} is damaged: it has no sequences")
    if not (np.isfinite(temperatures) & (temperatures >= 0)).all():
        raise ValueError(f"corpus shard {path} is damaged: temperatures must be finite, at least 0")
    if tokens.min() < 0:
        raise ValueError(f"corpus shard {path} is damaged: token ids must be at least 0")
    if fingerprint is not None and made_for not in (None, fingerprint):
        raise ValueError(f"corpus shard {path} was made for another target")
    if vocab_size is not None and tokens.max() >= vocab_size:
        raise ValueError(f"corpus shard {path} has tokens beyond the vocabulary of {vocab_size}")
    return [
        Sequence(tokens[offsets[i] : offsets[i + 1]], int(starts[i]), float(temperatures[i]))
        for i in range(len(starts))
    ]


def _read_arrays(path: Path) -> tuple[dict[str, np.ndarray], int | None]:
    """The arrays of a shard, integers as int64, and the fingerprint in it, if there is one."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ARRAYS}
            made_for = int(file["target"].item()) if "target" in file else None
    except Exception as error:  # zipfile, zlib, numpy and OS errors all mean the same thing here
        raise ValueError(f"corpus shard {path} is damaged: {error}") from error
    for name, (kinds, what) in ARRAYS.items():
        array = arrays[name]
        if array.ndim != 1 or array.dtype.kind not in kinds:
            raise ValueError(
                f"corpus shard {path} is damaged: {name} must be a row of {what}, "
                f"got {array.dtype} of shape {list(array.shape)}"
            )
        arrays[name] = array if "f" in kinds else array.astype(np.int64)
    return arrays, made_for


def tokens_mark(sequences: list[Sequence]) -> int:
    """A checksum of a shard's tokens and of where each sequence ends."""
    lengths = np.array([len(s.tokens) for s in sequences], np.int64)
    mark = zlib.crc32(lengths.tobytes())
    for sequence in sequences:
        mark = zlib.crc32(np.ascontiguousarray(sequence.tokens, np.int64).tobytes(), mark)
    return mark


def shard_paths(work: Path) -> list[Path]:
    """All corpus shards of a work folder, in name order."""
    return sorted((work / "corpus").glob("*.npz"))


def shards_named(work: Path, name: str) -> list[Path]:
    """The shards `NAME-0000`, ... that are there."""
    shape = re.compile(re.escape(name) + r"-\d{4,}")
    return [path for path in shard_paths(work) if shape.fullmatch(path.stem)]


def readable_shards(
    work: Path, warn=print, fingerprint: int | None = None, vocab_size: int | None = None
) -> Iterator[tuple[str, list[Sequence]]]:
    """`(name, sequences)` of every shard that `read_shard` takes; others are named and skipped."""
    for path in shard_paths(work):
        try:
            yield path.stem, read_shard(path, fingerprint, vocab_size)
        except ValueError as error:
            warn(f"skipped: {error}")


def count_answers(
    work: Path, vocab_size: int, warn=print, fingerprint: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """How often each token is in the answers: `[V]` of the training ones, `[V]` of those held out.

    Shards that are damaged or for another target are named and skipped.

    Raises:
        ValueError: all are; the first is named again.
    """
    train, heldout = np.zeros(vocab_size, np.int64), np.zeros(vocab_size, np.int64)
    skipped: list[str] = []
    number = 0
    for _, sequences in readable_shards(work, skipped.append, fingerprint, vocab_size):
        number += 1
        for sequence in sequences:
            counts = heldout if is_heldout(sequence.prompt) else train
            np.add.at(counts, sequence.answer, 1)
    for line in skipped:
        warn(line)
    if skipped and not number:
        raise ValueError(f"corpus: no shard can be used; {skipped[0]}")
    return train, heldout


def import_corpus(
    source: Path,
    work: Path,
    name: str,
    shard_tokens: int = 32768,
    seed: int = 0,
    fingerprint: int | None = None,
    vocab_size: int | None = None,
) -> Counter:
    """Cut an existing corpus file into filtered, shuffled shards, the held-out ones first.

    They are for the target of that fingerprint and vocabulary.

    Raises:
        ValueError: the file is damaged or for another target, has no usable answer, or its shards
            would mix with others of that name.
    """
    keep = Filter()
    every = read_shard(source, fingerprint, vocab_size)
    kept = [s for s in map(keep, every) if s is not None]
    if not kept:
        raise ValueError(
            f"import-file: {source} has no answer of at least {keep.min_answer} tokens"
        )
    order = np.random.default_rng(seed).permutation(len(kept))
    kept = [kept[i] for i in order]
    heldout = [s for s in kept if is_heldout(s.prompt)]
    rest = [s for s in kept if not is_heldout(s.prompt)]
    keep.counts["held out"] = len(heldout)
    shards = {0: heldout} if heldout else {}
    shards |= dict(enumerate(_cut(rest, shard_tokens), start=1))
    paths = {work / "corpus" / f"{name}-{i:04d}.npz": shard for i, shard in shards.items()}
    there = set(shards_named(work, name))
    if (
        (work / "corpus" / f"{name}.json").exists()
        or there - paths.keys()
        or not {_made_for(path) for path in there} <= {None, fingerprint}
    ):
        raise ValueError(
            f"import-file: {work / 'corpus'} has other shards named {name}; give another --name"
        )
    for path, shard in paths.items():
        write_shard(path, shard, fingerprint)
    keep.counts["shards"] = len(paths)
    return keep.counts


def _made_for(path: Path) -> int | None:
    """The fingerprint in a shard; None where it has none, or cannot be read."""
    try:
        return _read_arrays(path)[1]
    except ValueError:
        return None


def _cut(sequences: list[Sequence], shard_tokens: int) -> Iterator[list[Sequence]]:
    """Parts of at least so many tokens, and what is left."""
    shard, size = [], 0
    for sequence in sequences:
        shard.append(sequence)
        size += len(sequence.tokens)
        if size >= shard_tokens:
            yield shard
            shard, size = [], 0
    if shard:
        yield shard
