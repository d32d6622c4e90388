"""What the host does in a round: dispatched ops, and milliseconds outside of tensor ops.

A random model with the depth of a real one (30 layers, drafter 5 layers, block 16) and narrow
layers, so that the ops cost little and the host shows. Greedy, batch and tree size varied:

    python benchmarks/profile_round.py --label after --output benchmarks/results/profile_round.json

Per setting: `ops_round` ops dispatched by one decode round, `ops_step` by the rest of a step
(plan to device, report back); `host_ms` a step's time outside the round (schedule, launch, read,
collect), `round_ms` the round's own, `python_ms` the round's time between its ops, seen by the
profiler and so an upper bound: a captured round has neither dispatches nor Python.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from fixtures import make_drafter, make_target  # noqa: E402

import ddtree.runtime.runner as runner_module  # noqa: E402
from ddtree import Engine, SamplingParams  # noqa: E402

CONTEXTS = (32, 400)
"""Prompt tokens."""


class OpCounter(TorchDispatchMode):
    """Counts dispatched ops while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


class Rounds:
    """Wraps the engine's decode round, to time it and to count its ops."""

    def __init__(self) -> None:
        self.inner = runner_module.decode_step
        self.count = self.profile = False
        self.seconds = 0.0
        self.ops: list[int] = []
        self.python: list[float] = []

    def __call__(self, *args: Any) -> Any:
        start = time.perf_counter()
        if self.count:
            with OpCounter() as counter:
                report = self.inner(*args)
            self.ops.append(counter.ops)
        elif self.profile:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
                start = time.perf_counter()
                report = self.inner(*args)
                wall = time.perf_counter() - start
            inside = sum(event.self_cpu_time_total for event in seen.key_averages())
            self.python.append(1e3 * wall - 1e-3 * inside)
        else:
            report = self.inner(*args)
        self.seconds = time.perf_counter() - start
        return report


def profile(engine: Engine, rounds: Rounds, batch: int, nodes: int, context: int) -> dict[str, Any]:
    """Measure steps of `batch` running requests; the median of six."""
    rng = random.Random(batch)
    params = SamplingParams(max_new_tokens=60, ignore_eos=True, budget=nodes - 1)
    requests = [
        engine._request("prompt", [rng.randrange(98) for _ in range(context)], params)
        for _ in range(batch)
    ]
    engine._submit(requests)
    loop = engine._loop
    while any(request.status != "running" for request in requests):
        loop.step()
    for _ in range(4):
        loop.step()
    host, inside = [], []
    for _ in range(6):
        start = time.perf_counter()
        loop.step()
        host.append(1e3 * (time.perf_counter() - start - rounds.seconds))
        inside.append(1e3 * rounds.seconds)
    rounds.count = True
    with OpCounter() as counter:
        loop.step()
    rounds.count, rounds.profile = False, True
    for _ in range(5):
        loop.step()
    rounds.profile = False
    engine._cancel(requests)
    return {
        "batch": batch,
        "nodes": nodes,
        "context": context,
        "ops_round": rounds.ops[-1],
        "ops_step": counter.ops - rounds.ops[-1],
        "host_ms": round(statistics.median(host), 3),
        "round_ms": round(statistics.median(inside), 2),
        "python_ms": round(statistics.median(rounds.python[-3:]), 2),
    }


def main() -> None:
    """Run all settings and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--nodes", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--label", default="after", help="entry of the JSON file")
    parser.add_argument("--output", type=Path, help="JSON file, updated")
    args = parser.parse_args()
    torch.set_num_threads(1)
    target = make_target(num_hidden_layers=args.layers, initializer_range=0.05)
    draft = make_drafter(target, num_layers=5, block_size=16, taps=(1, 8, 15, 22, 28))
    rounds = Rounds()
    runner_module.decode_step = rounds
    rows = []
    print("| batch | nodes | context | ops/round | ops/step | host ms | round ms | python ms |")
    print("|---|---|---|---|---|---|---|---|")
    for nodes in args.nodes:
        for batch in args.batches:
            with Engine(
                str(target), str(draft), budget=nodes - 1, max_batch_size=batch, num_pages=1600
            ) as engine:
                for context in CONTEXTS:
                    row = profile(engine, rounds, batch, nodes, context)
                    rows.append(row)
                    print("|", " | ".join(str(value) for value in row.values()), "|", flush=True)
    result = {
        "machine": f"{platform.machine()}, 1 thread, torch {torch.__version__}",
        "model": f"random, {args.layers} layers of 64, drafter 5 layers, block 16",
        "rows": rows,
    }
    if args.output:
        everything = json.loads(args.output.read_text()) if args.output.exists() else {}
        everything[args.label] = result
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
