"""Counts what the ranks of a round say to each other, and predicts its time on 8 GPUs with NVLink.

The engine's own round runs on the meta device, as one rank of Qwen3-8B and its drafter (the shapes
of gpu_check.py, bfloat16), with a group that counts collectives instead of making them. Every
matmul and every attention is noted with the bytes it reads and the operations it makes. Nothing is
measured: the times are what data sheets allow, plus a fixed latency per collective.

    python benchmarks/scaling.py --output benchmarks/results/scaling.json
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from gpu_check import PAGE, shapes  # noqa: E402

from ddtree.config import DraftConfig, ModelConfig  # noqa: E402
from ddtree.kernels import get_ops  # noqa: E402
from ddtree.kernels.reference import TorchOps  # noqa: E402
from ddtree.models.dummy import dummy_models  # noqa: E402
from ddtree.models.layers import Rope  # noqa: E402
from ddtree.models.llama import Llama  # noqa: E402
from ddtree.models.qwen3 import Qwen3  # noqa: E402
from ddtree.parallel import Parallel  # noqa: E402
from ddtree.runtime.kv_cache import allocate_pool  # noqa: E402
from ddtree.runtime.machine import Machine  # noqa: E402
from ddtree.runtime.pages import pages_for  # noqa: E402
from ddtree.runtime.plan import DecodeSpec, Level  # noqa: E402
from ddtree.runtime.sampler import TreeWeights  # noqa: E402
from ddtree.runtime.stats import StageTimer  # noqa: E402
from ddtree.runtime.step import decode_step  # noqa: E402
from ddtree.state import RowState  # noqa: E402

META = torch.device("meta")
LATENCY_US = 10.0
"""Microseconds that a collective takes however small it is: a kernel, and an exchange among 8 GPUs.
A round figure, assumed."""
KINDS = ("sum", "max", "gather")
"""All-reduces and the all-gather of `Parallel`."""


@dataclass(frozen=True)
class Chip:
    """What one GPU can do, from NVIDIA's data sheets, and its NVLink in one direction."""

    memory: float
    """Bytes per second."""
    flops: float
    """Dense bfloat16 operations per second."""
    link: float
    """Bytes per second that it can send while it receives as many: half of the total quoted."""


CHIPS = {
    "H200": Chip(memory=4.8e12, flops=989e12, link=450e9),
    "B200": Chip(memory=8.0e12, flops=2250e12, link=900e9),
}


@dataclass(frozen=True)
class Call:
    """One collective."""

    kind: str
    bytes: int
    """Of the tensor that this rank brings."""
    shape: tuple[int, ...]

    def sent(self, size: int) -> float:
        """Bytes that a rank of `size` sends, and receives, in a ring.

        2 (n - 1) / n of an all-reduced tensor, n - 1 times an all-gathered one: the factors of
        nccl-tests' doc/PERFORMANCE.md ("bus bandwidth").
        """
        if self.kind == "gather":
            return (size - 1) * self.bytes
        return 2 * (size - 1) / size * self.bytes


class CountingRanks(Parallel):
    """One rank of `size`, without the others: notes what it would say to them."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size
        self.calls: list[Call] = []

    def all_sum(self, x: Tensor) -> Tensor:
        """As it is."""
        return self._note("sum", x)

    def all_max(self, x: Tensor) -> Tensor:
        """As it is."""
        return self._note("max", x)

    def all_gather(self, x: Tensor) -> Tensor:
        """`x [...]` -> `[size, ...]` of the right shape."""
        return self._note("gather", x).new_empty(self.size, *x.shape)

    def _note(self, kind: str, x: Tensor) -> Tensor:
        assert x.is_contiguous(), (kind, x.shape, x.stride())
        self.calls.append(Call(kind, x.numel() * x.itemsize, tuple(x.shape)))
        return x


@dataclass(frozen=True)
class Work:
    """One matmul or attention: what it has to read, weights or keys and values, and compute."""

    bytes: int
    flops: int


@dataclass
class Rank:
    """One rank's models, which note what a round does."""

    ranks: CountingRanks
    ops: TorchOps
    target: Any
    drafter: Any
    work: list[Work] = field(default_factory=list)
    context: int = 0
    """Committed keys of every row."""

    @classmethod
    def build(
        cls,
        target: ModelConfig,
        draft: DraftConfig,
        size: int,
        rank: int,
        kernels: str,
        kind: type[Llama] = Qwen3,
    ) -> Rank:
        """Build rank `rank` of `size` of the models, in bfloat16 and without content."""
        ranks = CountingRanks(rank, size)
        ops = get_ops(kernels, META)
        made = cls(ranks, ops, *dummy_models(target, draft, kind, ops, META, torch.bfloat16, ranks))
        made._watch()
        return made

    def _watch(self) -> None:
        linear, attention = self.ops.linear, self.ops.attention

        def counted_linear(x: Tensor, weight: Any) -> Tensor:
            rows = x.numel() // x.shape[-1]
            self.work.append(Work(weight.numel() * weight.itemsize, 2 * rows * weight.numel()))
            return linear(x, weight)

        def counted_attention(q: Tensor, kv_layer: Tensor, *rest: Any) -> Tensor:
            batch, tokens, heads, dim = q.shape
            keys = batch * (self.context + tokens)
            read = keys * kv_layer[0].numel() * kv_layer.itemsize
            self.work.append(Work(read, 4 * keys * tokens * heads * dim))
            return attention(q, kv_layer, *rest)

        self.ops.linear, self.ops.attention = counted_linear, counted_attention

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights that this rank holds, those that ranks share included."""
        found = tensors([self.target, self.drafter], {})
        return sum(tensor.numel() * tensor.itemsize for tensor in found)

    @torch.inference_mode()
    def run(self, spec: DecodeSpec, batch: int, budget: int, context: int) -> None:
        """One decode round of `batch` rows behind `context` tokens each; notes calls and work."""
        self.ranks.calls.clear()
        self.work.clear()
        self.context = context
        block = self.drafter.config.block_size
        width = pages_for(context + max(spec.num_nodes, block), PAGE)
        pools = [
            allocate_pool(*model.kv_shape, batch * width, PAGE, model.dtype, META)
            for model in (self.target, self.drafter)
        ]
        weights = TreeWeights.make(None, block - 1, META)
        count = max(1, min(budget, self.target.config.vocab_size))
        machine = Machine(self.target, self.drafter, self.ops, *pools, PAGE, count, weights)
        rows = RowState.allocate(batch, width, self.target.vocab.size, META)
        slots = torch.zeros(batch, dtype=torch.int64, device=META)
        report = decode_step(machine, rows, slots, width, spec, StageTimer(False))
        assert report.shape == (batch, spec.layout.width)


def tensors(part: Any, seen: dict[int, Any]) -> list[Tensor]:
    """Every tensor once that a model's parts hold; RoPE tables are none of its weights."""
    if id(part) in seen or isinstance(part, Rope):
        return []
    seen[id(part)] = part
    if isinstance(part, Tensor):
        return [part]
    if type(part).__module__.startswith("ddtree.models."):
        part = list(vars(part).values())
    inside = part if isinstance(part, (list, tuple)) else ()
    return [tensor for one in inside for tensor in tensors(one, seen)]


def predict(rank: Rank, chip: Chip, latency: float) -> dict[str, float]:
    """Milliseconds of the round that was run last: one piece of work after the other."""
    work = sum(max(one.bytes / chip.memory, one.flops / chip.flops) for one in rank.work)
    size, calls = rank.ranks.size, rank.ranks.calls
    talk = sum(latency + call.sent(size) / chip.link for call in calls)
    parts = {"work_ms": work, "collective_ms": talk, "round_ms": work + talk}
    return {name: round(1e3 * seconds, 4) for name, seconds in parts.items()}


def describe(rank: Rank, latency: float) -> dict[str, Any]:
    """What the round that was run last does."""
    calls = rank.ranks.calls
    return {
        "collectives": {
            kind: {
                "calls": sum(call.kind == kind for call in calls),
                "bytes": sum(call.bytes for call in calls if call.kind == kind),
            }
            for kind in KINDS
        },
        "sent_bytes": round(sum(call.sent(rank.ranks.size) for call in calls)),
        "read_bytes": sum(one.bytes for one in rank.work),
        "flops": sum(one.flops for one in rank.work),
        "predicted": {name: predict(rank, chip, latency) for name, chip in CHIPS.items()},
    }


LEVELS = {
    "greedy": Level.GREEDY,
    "noise": Level.NOISE,
    "full": Level.FULL,
    "full, logprobs": Level.FULL | Level.LOGPROBS,
}
MODES = ("off", "chain", "tree")


def round_spec(mode: str, level: str, budget: int, block: int) -> DecodeSpec:
    """The round of an engine with this budget."""
    nodes = {"off": 1, "chain": block, "tree": budget + 1}[mode]
    return DecodeSpec(mode, nodes, min(nodes, block), LEVELS[level])


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown of the main rows."""
    head = ["tp", "budget", "batch", *KINDS, "MB sent"]
    for name in CHIPS:
        head += [f"{name}: work", "talk", "round ms", "x"]
    lines = []
    for row in rows:
        first = next(r for r in rows if (r["budget"], r["batch"]) == (row["budget"], row["batch"]))
        cells = [row["tp"], row["budget"], row["batch"], *_counts(row)]
        for name in CHIPS:
            found = row["predicted"][name]
            cells += [f"{found[part]:.2f}" for part in ("work_ms", "collective_ms", "round_ms")]
            cells.append(f"{first['predicted'][name]['round_ms'] / found['round_ms']:.1f}")
        lines.append(cells)
    return _markdown(head, lines)


def level_table(rows: list[dict[str, Any]]) -> str:
    """Markdown of the rounds by mode and level."""
    head = ["mode", "level", *KINDS, "MB sent", *(f"{name} ms" for name in CHIPS)]
    lines = []
    for row in rows:
        times = [f"{row['predicted'][name]['round_ms']:.2f}" for name in CHIPS]
        lines.append([row["mode"], row["level"], *_counts(row), *times])
    return _markdown(head, lines)


def _counts(row: dict[str, Any]) -> list[Any]:
    counts = [row["collectives"][kind]["calls"] for kind in KINDS]
    return [*counts, f"{row['sent_bytes'] / 1e6:.1f}"]


def _markdown(head: list[Any], lines: list[list[Any]]) -> str:
    return "\n".join(
        "| " + " | ".join(map(str, cells)) + " |" for cells in (head, ["---"] * len(head), *lines)
    )


def main() -> None:
    """Count all rounds, print the tables and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a small model of the same make")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--budgets", type=int, nargs="+", default=[15, 63, 127])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=2048)
    fused = find_spec("triton") is not None
    parser.add_argument(
        "--kernels", choices=("triton", "torch"), default=("torch", "triton")[fused]
    )
    parser.add_argument("--latency-us", type=float, default=LATENCY_US, help="per collective")
    parser.add_argument("--output", type=Path, help="JSON file for the tables")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows, levels, weights, latency = [], [], {}, 1e-6 * args.latency_us
    middle = args.budgets[len(args.budgets) // 2], args.batches[len(args.batches) // 2]
    for size in args.tp:
        # The last rank has the largest parts.
        rank = Rank.build(*shapes(not args.small), size, size - 1, args.kernels)
        weights[size] = rank.weight_bytes
        block = rank.drafter.config.block_size
        for budget in args.budgets:
            for batch in args.batches:
                rank.run(round_spec("tree", "greedy", budget, block), batch, budget, args.context)
                rows.append(
                    {"tp": size, "budget": budget, "batch": batch, **describe(rank, latency)}
                )
        if size == max(args.tp):
            budget, batch = middle
            setting = {"tp": size, "budget": budget, "batch": batch}
            for mode in MODES:
                for level in LEVELS:
                    rank.run(round_spec(mode, level, budget, block), batch, budget, args.context)
                    levels.append(
                        {**setting, "mode": mode, "level": level, **describe(rank, latency)}
                    )
    for size, count in weights.items():
        print(f"tp {size}: {count / 1e9:.3f} GB of weights per rank")
    print(f"\n{table(rows)}\n\ntp {max(args.tp)}, budget {middle[0]}, batch {middle[1]}:\n")
    print(level_table(levels))
    result = {
        "models": "small" if args.small else "Qwen3-8B, 5-layer DFlash drafter, block 16; bfloat16",
        "context": args.context,
        "kernels": args.kernels,
        "chips": {name: vars(chip) for name, chip in CHIPS.items()},
        "latency_us": args.latency_us,
        "measured": False,
        "weight_bytes": weights,
        "rows": rows,
        "levels": levels,
    }
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
