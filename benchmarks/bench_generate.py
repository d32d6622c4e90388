"""Plain decoding, chain and trees of this engine against each other and `transformers` generate.

All contenders run every prompt in one process, interleaved and in rotating order; speeds are
medians over the prompts of tokens per second (prompt processing included), and speedups are
medians of the per-prompt ratios, after two prompts to warm up. "In total" compares all tokens
divided by all seconds. Greedy, batch 1. Run it on an idle
machine:

    python benchmarks/bench_generate.py --threads 2 --output benchmarks/results/generate.json
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

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from get_demo_model import demo_target  # noqa: E402
from train_drafter.prompts import read_prompts  # noqa: E402

from ddtree import Engine, SamplingParams  # noqa: E402

DRAFT = ROOT / "examples" / "assets" / "smollm2-135m-dflash"
QUESTIONS = ROOT / "examples" / "train_drafter" / "prompts_eval.txt"
QUERY_TOKENS = (1, 2, 4, 8, 16, 32, 64)


def contenders(
    engine: Engine, automatic: Engine, budgets: list[int], new_tokens: int
) -> dict[str, Callable]:
    """Name -> function of prompt ids giving (token ids, stats or None).

    automatic: the engine with the budget that is the default.
    """

    def ours(engine: Engine = engine, **options: Any) -> Callable:
        params = SamplingParams(max_new_tokens=new_tokens, **options)

        def run(ids: list[int]) -> tuple[list[int], Any]:
            (output,) = engine.generate(ids, params)
            return output.token_ids, output.stats

        return run

    runs = {"off": ours(speculation="off"), "chain": ours(speculation="chain")}
    runs["tree auto"] = ours(automatic)
    runs |= {f"tree {budget}": ours(budget=budget) for budget in budgets}
    return runs


def transformers_generate(folder: str, new_tokens: int) -> Callable:
    """The same interface over `transformers`' own greedy generate."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def run(ids: list[int]) -> tuple[list[int], Any]:
        prompt = torch.tensor([ids])
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=new_tokens,
            do_sample=False,
        )
        return out[0, len(ids) :].tolist(), None

    return run


@torch.inference_mode()
def forward_times(engine: Engine, context: int, repeats: int) -> dict[int, float]:
    """Median milliseconds of a target forward with its head, per number of query tokens."""
    runner = engine._loop.runner
    machine, pages = runner.machine, -(-(context + max(QUERY_TOKENS)) // runner.machine.page_size)
    from ddtree.runtime.kv_cache import slots_of
    from ddtree.state import StepState

    table = torch.arange(2, 2 + pages)[None]
    prefix = torch.tensor([context])
    times: dict[int, list[float]] = {count: [] for count in QUERY_TOKENS}
    for _ in range(repeats):
        for count in QUERY_TOKENS:
            start = time.perf_counter()
            plan = machine.ops.plan_attention(
                table, prefix, count, machine.page_size, machine.target.views("causal")
            )
            positions = context + torch.arange(count)[None]
            state = StepState(positions, slots_of(table, positions, machine.page_size), plan)
            tokens = torch.randint(0, 1000, (1, count))
            hidden, _ = machine.target(tokens, state, machine.target_kv, machine.taps)
            machine.ops.argmax(machine.target.logits(hidden))
            times[count].append(time.perf_counter() - start)
    return {count: 1e3 * statistics.median(samples) for count, samples in times.items()}


def main() -> None:
    """Run the benchmark and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="default: the demo target")
    parser.add_argument("--draft", default=str(DRAFT))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--prompts", type=int, default=12, help="how many of the evaluation prompts, evenly spread"
    )
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--budgets", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    questions = read_prompts(QUESTIONS)
    if not 0 < args.prompts <= len(questions):
        parser.error(f"--prompts must be in 1..{len(questions)}, got {args.prompts}")
    torch.set_num_threads(args.threads)
    target = args.target or str(demo_target())

    engine = Engine(target, args.draft, budget=max(args.budgets), max_model_len=2048)
    automatic = Engine(target, args.draft, max_model_len=2048)
    runs = contenders(engine, automatic, args.budgets, args.new_tokens)
    runs["transformers"] = transformers_generate(target, args.new_tokens)
    names = list(runs)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    counts: dict[str, list[int]] = {name: [] for name in names}
    stats: dict[str, list[Any]] = {name: [] for name in names}
    differing = dict.fromkeys(names, 0)
    prompts = [
        engine.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for question in questions[:: len(questions) // args.prompts][: args.prompts]
    ]
    for run in runs.values():  # shapes are recorded when they come for the third time
        for prompt in prompts[:2]:
            run(prompt)
    for index, prompt in enumerate(prompts):
        shift = index % len(names)
        outputs = {}
        for name in names[shift:] + names[:shift]:
            start = time.perf_counter()
            outputs[name], stat = runs[name](prompt)
            seconds[name].append(time.perf_counter() - start)
            counts[name].append(len(outputs[name]))
            stats[name].append(stat)
        for name in names:
            differing[name] += outputs[name] != outputs["off"]
        print(f"prompt {index + 1}/{len(prompts)}", file=sys.stderr)

    speed = {n: [c / s for c, s in zip(counts[n], seconds[n], strict=True)] for n in names}
    total_speed = {n: sum(counts[n]) / sum(seconds[n]) for n in names}
    rows = []
    for name in names:
        done = [s for s in stats[name] if s is not None]
        rounds = sum(s.rounds for s in done)
        emitted = sum(s.rounds * s.acceptance_length for s in done)
        stages: dict[str, float] = {}
        for stat in done:
            for stage, value in stat.stage_seconds.items():
                stages[stage] = stages.get(stage, 0.0) + value
        total = sum(stages.values())
        rows.append(
            {
                "mode": name,
                "tokens_per_round": round(emitted / rounds, 3) if rounds else None,
                "tokens_per_second": round(statistics.median(speed[name]), 2),
                "vs_off": round(_ratio(speed[name], speed["off"]), 3),
                "in_total": round(total_speed[name] / total_speed["off"], 3),
                "vs_transformers": round(_ratio(speed[name], speed["transformers"]), 3),
                "differing_outputs": differing[name],
                "ms_per_round": round(1e3 * total / rounds, 2) if rounds else None,
                "stage_share": {k: round(v / total, 4) for k, v in stages.items()},
            }
        )
    forward = forward_times(engine, context=256, repeats=15)
    result = {
        "command": "python " + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "machine": f"{cpu_name()}, {args.threads} threads, torch {torch.__version__}",
        "prompts": len(prompts),
        "new_tokens": args.new_tokens,
        "rows": rows,
        "forward_ms_at_context_256": {k: round(v, 2) for k, v in forward.items()},
    }
    _print(result)
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n")


def _ratio(ours: list[float], theirs: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def cpu_name() -> str:
    """What the processor calls itself."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _print(result: dict[str, Any]) -> None:
    print(f"{result['machine']}; {result['prompts']} prompts x {result['new_tokens']} tokens\n")
    columns = ("tokens/round", "tokens/s", "vs off", "in total", "vs transformers", "differing")
    print(f"| mode | {' | '.join(columns)} |\n|---{'|---' * len(columns)}|")
    for row in result["rows"]:
        rounds = f"{row['tokens_per_round']:.2f}" if row["tokens_per_round"] else "-"
        print(
            f"| {row['mode']} | {rounds} | {row['tokens_per_second']:.1f} "
            f"| {row['vs_off']:.2f} | {row['in_total']:.2f} | {row['vs_transformers']:.2f} "
            f"| {row['differing_outputs']} |"
        )
    print("\nshare of a round | draft | build | verify | commit | host | ms per round")
    for row in result["rows"]:
        if row["ms_per_round"]:
            share = row["stage_share"]
            parts = " | ".join(
                f"{100 * share.get(stage, 0):.1f} %"
                for stage in ("draft", "build", "verify", "commit", "host")
            )
            print(f"{row['mode']} | {parts} | {row['ms_per_round']}")
    print("\ntarget forward at context 256, ms by query tokens:")
    print(", ".join(f"{k}: {v:.1f}" for k, v in result["forward_ms_at_context_256"].items()))


if __name__ == "__main__":
    main()
