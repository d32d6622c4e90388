"""Times the torch tree builder against the heap on CPU, over budgets and batches.

Both build the same trees from the same candidates: log-probabilities of random logits, spread like
a drafter's (deeper is flatter). The builder runs on one thread. Medians; the two alternate.

    python benchmarks/bench_tree.py --output benchmarks/results/bench_tree.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ddtree.tree import build_tree, reference

DEPTH, VOCAB = 15, 4096
BUDGETS = (16, 32, 64, 128, 256, 512)
BATCHES = (1, 8, 32)


def candidates(batch: int, width: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and weights [B, L, K] of a made-up drafter."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.linspace(6.0, 2.5, DEPTH)[:, None]
    logits = torch.randn(batch, DEPTH, VOCAB, generator=generator) * spread
    weights, ids = logits.log_softmax(-1).topk(width, -1)
    return ids, weights


def milliseconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def compare(batch: int, budget: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of both for one batch, after checking that the trees are equal."""
    ids, weights = candidates(batch, budget, seed=budget)
    anchor = torch.zeros(batch, dtype=torch.int64)

    def heap() -> list[reference.ReferenceTree]:
        rows = zip(anchor.tolist(), ids.tolist(), weights.tolist(), strict=True)
        return [reference.build_tree(*row, budget + 1) for row in rows]

    def builder() -> Any:
        return build_tree(anchor, ids, weights, budget + 1)

    tree, expected = builder(), heap()
    assert tree.tokens.tolist() == [one.tokens for one in expected]
    assert tree.words.tolist() == [one.words for one in expected]
    assert tree.scores.tolist() == [one.scores for one in expected]
    times = [(milliseconds(builder), milliseconds(heap)) for _ in range(repeats)]
    ours, theirs = (statistics.median(column) for column in zip(*times, strict=True))
    return {
        "batch": batch,
        "budget": budget,
        "builder_ms": round(ours, 3),
        "heap_ms": round(theirs, 3),
        "heap_over_builder": round(theirs / ours, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budgets", type=int, nargs="+", default=list(BUDGETS))
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for batch in args.batches:
        for budget in args.budgets:
            rows.append(compare(batch, budget, args.repeats))
            print(rows[-1], flush=True)
    result = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "depth": DEPTH,
        "candidates": "as many as the budget",
        "rows": rows,
    }
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
