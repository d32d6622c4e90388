"""Counts what the attention and KV kernels have to move at the shapes of gpu_check.py.

Markdown tables for docs/kernels.md: the least bytes that any kernel must move, what ours move, and
the time that either the memory (4.8 TB/s) or the tensor cores (989 TFLOP/s) of an H200 allow.

    python benchmarks/kernel_bytes.py
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from ddtree.kernels.paged_plan import Chip, choose_splits, choose_tile  # noqa: E402

BANDWIDTH, FLOPS = 4.8e12, 989e12
SIZE = 2
"""Bytes per number: bfloat16."""
CONTEXTS = (512, 8192, 32768)
BUDGETS = (0, 15, 63, 127, 255)
ROOM = 32768 + 1024 + 512
"""Tokens that the block table has room for, whatever the context."""


@dataclass(frozen=True)
class Shape:
    """A model, as far as attention knows it; Qwen3-8B unless told otherwise."""

    layers: int = 36
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128


@dataclass(frozen=True)
class Moved:
    """Bytes and operations of one attention call, all layers."""

    least: float
    """Queries, keys, values and output, each once."""
    memory: float
    """To and from memory: the least, and the splits' partial results, written and read."""
    loaded: float
    """Into the multiprocessors: each tile of rows loads the keys; all but the first from L2."""
    flops: float
    tiles: int
    splits: int

    @property
    def microseconds(self) -> float:
        """The larger of what memory and tensor cores allow."""
        return 1e6 * max(self.memory / BANDWIDTH, self.flops / FLOPS)


def attention(shape: Shape, tokens: int, context: int, batch: int = 1) -> Moved:
    """What `paged_attention` moves for `tokens` per row after `context` committed ones."""
    group = shape.heads // shape.kv_heads
    rows = tokens * group
    tile = choose_tile(rows, shape.dim, SIZE, Chip())
    tiles = -(-rows // tile.rows)
    programs = tiles * batch * shape.kv_heads
    splits = choose_splits(programs, batch, -(-ROOM // tile.keys), Chip().multiprocessors)
    blocks = -(-context // tile.keys) + -(-tokens // tile.keys)
    calls = batch * shape.layers
    kv = (context + tokens) * 2 * shape.kv_heads * shape.dim * SIZE
    io = 2 * tokens * shape.heads * shape.dim * SIZE
    parts = min(splits, blocks) * tokens * shape.heads * (shape.dim + 1) * 4 if splits > 1 else 0
    return Moved(
        least=calls * (kv + io),
        memory=calls * (kv + io + 2 * parts),
        loaded=calls * (tiles * kv + io + 2 * parts),
        flops=calls * 4.0 * rows * (context + tokens) * shape.dim * shape.kv_heads,
        tiles=tiles,
        splits=splits,
    )


def attention_table(shape: Shape, tokens: list[int]) -> None:
    """One row per number of tokens and context."""
    print(
        "| tokens | context | tiles x splits | least MB | moved MB | ratio | SMs MB | GFLOP | us |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for count in tokens:
        for context in CONTEXTS:
            m = attention(shape, count, context)
            print(
                f"| {count} | {context} | {m.tiles} x {m.splits} | {m.least / 1e6:.0f} | "
                f"{m.memory / 1e6:.0f} | {m.memory / m.least:.2f} | {m.loaded / 1e6:.0f} | "
                f"{m.flops / 1e9:.0f} | {m.microseconds:.0f} |"
            )


def store_table(target: Shape, draft: Shape, nodes: int, block: int) -> None:
    """The kernels that store, per round at batch 1: launches, bytes, time."""

    def slot(shape: Shape) -> int:
        return 2 * shape.kv_heads * shape.dim * SIZE

    def unfused(shape: Shape) -> int:
        """Norms of q and k, rope of each, and the store: each reads and writes what it touches."""
        q, k = shape.heads * shape.dim * SIZE, shape.kv_heads * shape.dim * SIZE
        return 2 * (2 * q + 2 * k) + 2 * slot(shape)

    def fused(shape: Shape) -> int:
        return 2 * (shape.heads * shape.dim * SIZE + slot(shape)) + 2 * 4 * shape.dim

    rows = [
        ("`write_kv`, target", target.layers, nodes * target.layers * 2 * slot(target)),
        ("five ops, target", 5 * target.layers, nodes * target.layers * unfused(target)),
        ("`rotate_and_write`, target", target.layers, nodes * target.layers * fused(target)),
        ("`rotate_and_write`, block", draft.layers, block * draft.layers * fused(draft)),
        ("`rotate_and_write`, context", 1, block * draft.layers * 2 * slot(draft)),
        ("`move_kv`, 4 rows", 1, 4 * target.layers * 2 * slot(target)),
    ]
    print("| kernel | launches | MB | us |")
    print("|---|---|---|---|")
    for name, launches, size in rows:
        print(f"| {name} | {launches} | {size / 1e6:.2f} | {1e6 * size / BANDWIDTH:.1f} |")


def main() -> None:
    """Print the tables."""
    target, draft = Shape(), Shape(layers=5)
    print("Verify, 36 layers\n")
    attention_table(target, [budget + 1 for budget in BUDGETS])
    print("\nDraft block, 5 layers\n")
    attention_table(draft, [16])
    print("\nStores of a round of 64 nodes\n")
    store_table(target, draft, 64, 16)


if __name__ == "__main__":
    main()
