"""Tokens per round of sampled decoding, by kind of tree; and what sampling costs.

Acceptance is counted over the demo's evaluation prompts, at temperatures 0, 0.7 and 1, with 95 %
bootstrap intervals over the prompts. The cost of a round at temperature 1 is measured against a
greedy one, at batch 1, interleaved, as the median of the ratios. Run it on an idle machine:

    python benchmarks/bench_sampling.py --threads 2 --output benchmarks/results/sampling.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples"), str(ROOT / "benchmarks")]

from bench_generate import DRAFT, cpu_name  # noqa: E402
from get_demo_model import demo_target  # noqa: E402
from train_drafter.evaluate import PROMPTS  # noqa: E402
from train_drafter.generate import chat_ids  # noqa: E402
from train_drafter.prompts import read_prompts  # noqa: E402

from ddtree import Engine, SamplingParams  # noqa: E402

TREES = {
    "coupled tree": {},
    "plain tree": {"coupling": False},
    "rejection": {"verify": "rejection"},
}
TEMPERATURES = (0.0, 0.7, 1.0)
SEED = 20000


def run(
    engine: Engine, prompts: list[list[int]], temperature: float, new_tokens: int, **mode: Any
) -> np.ndarray:
    """Tokens emitted by rounds, and rounds, of every prompt: [prompts, 2]."""
    params = [
        SamplingParams(max_new_tokens=new_tokens, temperature=temperature, seed=SEED + i, **mode)
        for i in range(len(prompts))
    ]
    outputs = engine.generate(prompts, params)
    return np.array([(len(o.token_ids) - 1, o.stats.rounds) for o in outputs])


def per_round(found: np.ndarray, picks: np.ndarray) -> np.ndarray:
    """Tokens per round of each resample `picks [draws, prompts]`."""
    sums = found[picks].sum(1)
    return sums[:, 0] / np.maximum(1, sums[:, 1])


def interval(values: np.ndarray) -> list[float]:
    """The middle 95 %."""
    return [round(float(np.quantile(values, q)), 3) for q in (0.025, 0.975)]


def acceptance(
    target: str, draft: str, budgets: list[int], limit: int, new_tokens: int, batch: int
) -> list[dict[str, Any]]:
    """One row per temperature, kind of tree and budget."""
    found: dict[tuple[float, str, int], np.ndarray] = {}
    for kind, options in TREES.items():
        with Engine(
            target, draft, budget=max(budgets), max_batch_size=batch, max_model_len=512, **options
        ) as engine:
            prompts = [chat_ids(engine, prompt) for prompt in read_prompts(PROMPTS)[:limit]]
            for temperature in TEMPERATURES:
                if kind != "coupled tree" and not temperature:
                    continue

                for budget in budgets:
                    found[temperature, kind, budget] = run(
                        engine, prompts, temperature, new_tokens, budget=budget
                    )
                    print(temperature, kind, budget, file=sys.stderr)
                if kind != "rejection":
                    chain = kind.replace("tree", "chain")
                    found[temperature, chain, 0] = run(
                        engine, prompts, temperature, new_tokens, speculation="chain"
                    )
    picks = np.random.default_rng(0).integers(0, limit, (2000, limit))
    rows = []
    for (temperature, kind, budget), one in sorted(found.items()):
        plain = found.get((temperature, "plain tree", budget))
        greedy = found.get((0.0, "coupled tree" if budget else "coupled chain", budget))
        total = one.sum(0)
        row: dict[str, Any] = {
            "temperature": temperature,
            "kind": kind,
            "budget": budget,
            "tokens_per_round": round(float(total[0] / total[1]), 3),
            "interval_95": interval(per_round(one, picks)),
        }
        for name, other in (("vs_plain_tree", plain), ("vs_greedy", greedy)):
            if other is not None and other is not one:
                ratio = per_round(one, picks) / per_round(other, picks)
                exact = total[0] / total[1] / (other.sum(0)[0] / other.sum(0)[1])
                row[name] = round(float(exact), 3)
                row[f"{name}_95"] = interval(ratio)
        rows.append(row)
    return rows


def cost(target: str, draft: str, budget: int, repeats: int, new_tokens: int) -> dict[str, float]:
    """Time of a round with each kind of sampling over a greedy one's, at batch 1."""
    kinds: dict[str, dict[str, Any]] = {
        "greedy": {},
        "temperature 1": {"temperature": 1.0},
        "temperature 1, top-p 0.9": {"temperature": 1.0, "top_p": 0.9},
    }
    modes = {"plain decoding": {"speculation": "off"}, f"tree {budget}": {}}
    ratios: dict[str, list[float]] = {}
    with Engine(target, draft, budget=budget, max_batch_size=1, max_model_len=512) as engine:
        prompt = chat_ids(engine, "Tell me about the sea.")
        for repeat in range(-1, repeats):
            for mode, options in modes.items():
                spent = {}
                for kind, sampling in kinds.items():
                    params = SamplingParams(
                        max_new_tokens=new_tokens,
                        ignore_eos=True,
                        seed=repeat + 9,
                        **sampling,
                        **options,
                    )
                    begin = time.perf_counter()
                    (output,) = engine.generate(prompt, params)
                    seconds = time.perf_counter() - begin - output.stats.ttft
                    spent[kind] = seconds / output.stats.rounds
                for kind in kinds:
                    if repeat >= 0 and kind != "greedy":
                        ratios.setdefault(f"{mode}, {kind}", []).append(
                            spent[kind] / spent["greedy"]
                        )
    return {name: round(statistics.median(values), 3) for name, values in ratios.items()}


def main() -> None:
    """Run both parts and print their tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="default: the demo target")
    parser.add_argument("--draft", default=str(DRAFT))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--budgets", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=7, help="of the cost measurement")
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target = args.target or str(demo_target())
    result = {
        "command": "python " + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": f"{cpu_name()}, {args.threads} threads, torch {torch.__version__}",
        "prompts": args.prompts,
        "new_tokens": args.new_tokens,
        "round_time_over_greedy": cost(target, args.draft, 8, args.repeats, 64),
        "rows": acceptance(
            target, args.draft, args.budgets, args.prompts, args.new_tokens, args.batch_size
        ),
    }
    print("| T | kind | budget | tokens per round | 95 % | vs plain tree | vs greedy |")
    print("|---|---|---|---|---|---|---|")
    for row in result["rows"]:
        low, high = row["interval_95"]
        print(
            f"| {row['temperature']} | {row['kind']} | {row['budget'] or '-'} "
            f"| {row['tokens_per_round']:.2f} | {low:.2f} - {high:.2f} "
            f"| {_cell(row, 'vs_plain_tree')} | {_cell(row, 'vs_greedy')} |"
        )
    print("\nround time over a greedy round's, batch 1:")
    for name, ratio in result["round_time_over_greedy"].items():
        print(f"{name}: {ratio:.2f}")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")


def _cell(row: dict[str, Any], name: str) -> str:
    if name not in row:
        return "-"
    low, high = row[f"{name}_95"]
    return f"{row[name]:.2f} ({low:.2f} - {high:.2f})"


if __name__ == "__main__":
    main()
