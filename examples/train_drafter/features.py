"""The target's features on disk: one memory-mapped file per corpus shard, checked when opened.

`NAME.bin` holds bfloat16 rows, one per corpus token: the M taps side by side, then the target's
final hidden state (after its norm; what its head sees). `NAME.json` says what they were made from.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ddtree.models.llama import Llama
from ddtree.runtime.kv_cache import allocate_pool, slots_of
from ddtree.runtime.pages import RESERVED_PAGES
from ddtree.state import StepState

from .data import Sequence, read_shard, readable_shards, tokens_mark


def write_features(
    path: Path, rows: Tensor, taps: tuple[int, ...], fingerprint: int, tokens: int
) -> None:
    """Write bfloat16 `rows` `[T, (M + 1) * H]` and their description, both atomically.

    tokens: `tokens_mark` of the shard that they were made from.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # A training that is running must not see the new rows under the old description.
    path.with_suffix(".json").unlink(missing_ok=True)
    raw = rows.contiguous().view(torch.int16).numpy().tobytes()
    about = {
        "rows": rows.shape[0],
        "width": rows.shape[1],
        "taps": list(taps),
        "hidden_size": rows.shape[1] // (len(taps) + 1),
        "target": fingerprint,
        "tokens": tokens,
        "crc32": zlib.crc32(raw),
    }
    for file, content in ((path, raw), (path.with_suffix(".json"), json.dumps(about).encode())):
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        temporary.write_bytes(content)
        os.replace(temporary, file)


def open_features(path: Path, taps: tuple[int, ...], fingerprint: int, tokens: int) -> Tensor:
    """Map a feature file: bfloat16 `[T, (M + 1) * H]`; writes never reach the disk.

    Raises:
        ValueError: the file is damaged, or belongs to another target, other taps or a shard of
            other `tokens` (`tokens_mark`); it is named.
    """
    try:
        about = json.loads(path.with_suffix(".json").read_text())
        raw = np.memmap(path, dtype=np.int16, mode="c")
        rows, width, crc = int(about["rows"]), int(about["width"]), about["crc32"]
        made_by, made_from = (about["target"], tuple(about["taps"])), about.get("tokens")
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(
            f"feature shard {path} is damaged: {error}; run `features` again"
        ) from error
    if made_by != (fingerprint, tuple(taps)):
        raise ValueError(f"feature shard {path} was made by another target or with other taps")
    if made_from != tokens:
        raise ValueError(
            f"feature shard {path} was made from other tokens than its corpus shard has; "
            "run `features` again"
        )
    if rows < 1 or raw.size != rows * width or zlib.crc32(raw) != crc:
        raise ValueError(
            f"feature shard {path} is damaged: size or checksum is wrong; run `features` again"
        )
    return torch.from_numpy(raw).view(torch.bfloat16).view(rows, width)


@torch.inference_mode()
def compute_features(
    target: Llama, sequences: list[np.ndarray], taps: tuple[int, ...], rows: int = 1500
) -> Tensor:
    """Features of whole sequences, one forward of the engine's own target model per batch.

    Args:
        sequences: token ids, each `[n]`; the result's rows are in their order, end to end.
        rows: most tokens of a batch, padding included; more would only leave the CPU's caches.

    Returns:
        bfloat16 `[sum of n, (M + 1) * H]`.
    """
    lengths = [len(tokens) for tokens in sequences]
    bounds = np.cumsum([0, *lengths])
    out = torch.empty(
        int(bounds[-1]), (len(taps) + 1) * target.config.hidden_size, dtype=torch.bfloat16
    )
    order = sorted(range(len(sequences)), key=lambda i: lengths[i])
    while order:
        length = lengths[order[-1]]
        picked = [order.pop() for _ in range(min(len(order), max(1, rows // length)))]
        tokens = torch.zeros(len(picked), length, dtype=torch.int64)
        for row, i in enumerate(picked):
            tokens[row, : lengths[i]] = torch.from_numpy(np.asarray(sequences[i], np.int64))
        hidden, tapped = target(tokens.to(target.device), *_throwaway_state(target, tokens), taps)
        both = torch.cat((tapped, hidden), dim=-1).to("cpu", torch.bfloat16)
        for row, i in enumerate(picked):
            out[bounds[i] : bounds[i + 1]] = both[row, : lengths[i]]
    return out


def _throwaway_state(target: Llama, tokens: Tensor, page: int = 16) -> tuple[StepState, Tensor]:
    """Positions, slots and a KV pool for one forward that starts at position 0.

    Nothing is kept of the K/V, so all layers share the memory of one.
    """
    config, device = target.config, target.device
    batch, length = tokens.shape
    width = -(-length // page)
    table = (RESERVED_PAGES + torch.arange(batch * width, device=device)).view(batch, width)
    positions = torch.arange(length, device=device).expand(batch, length)
    slots = slots_of(table, positions, page)
    start = torch.zeros(batch, dtype=torch.int64, device=device)
    plan = target.ops.plan_attention(table, start, length, page, target.views("causal"))
    pool = allocate_pool(
        1, config.num_kv_heads, config.head_dim, batch * width, page, target.dtype, device
    )
    return StepState(positions, slots, plan), pool.expand(config.num_layers, *pool.shape[1:])


def add_features(
    work: Path,
    target: Llama,
    taps: tuple[int, ...],
    fingerprint: int,
    say: Callable[[str], object] = print,
) -> int:
    """Compute the features of every corpus shard that has none yet; returns how many it made.

    Features that do not belong to their shard any more, or are damaged, count as none. One shard
    at a time, each written atomically: a killed job loses the shard it was at.

    Raises:
        ValueError: there is no corpus shard that can be used.
    """
    vocab, usable, left = target.config.vocab_size, 0, []
    for name, sequences in readable_shards(work, say, fingerprint, vocab):
        usable += 1
        if not _fits(work / "features" / f"{name}.bin", sequences, taps, fingerprint):
            left.append(name)
    if not usable:
        raise ValueError(
            f"features: no usable corpus shards in {work / 'corpus'}; run `corpus` for this target"
        )
    for number, name in enumerate(left):
        sequences = read_shard(work / "corpus" / f"{name}.npz", fingerprint, vocab)
        began = time.monotonic()
        rows = compute_features(target, [sequence.tokens for sequence in sequences], taps)
        path, mark = work / "features" / f"{name}.bin", tokens_mark(sequences)
        write_features(path, rows, taps, fingerprint, mark)
        seconds = time.monotonic() - began
        say(
            f"features {name}: {len(rows)} tokens, {len(rows) / seconds:.0f} tok/s, about "
            f"{seconds * (len(left) - number - 1) / 60:.0f} min left"
        )
    return len(left)


def _fits(path: Path, sequences: list[Sequence], taps: tuple[int, ...], fingerprint: int) -> bool:
    """Whether the feature file can be used with a shard of these sequences."""
    try:
        open_features(path, taps, fingerprint, tokens_mark(sequences))
    except ValueError:
        return False
    return True
