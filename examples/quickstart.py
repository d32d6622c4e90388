"""Chat with the demo pair, then compare the decoding modes: what `make demo` runs.

python examples/quickstart.py
python examples/quickstart.py --target Qwen/Qwen3-4B --draft z-lab/Qwen3-4B-DFlash-b16
"""

import argparse
import os
import sys
import time
from pathlib import Path
from statistics import median

import torch
from get_demo_model import demo_target
from tqdm import tqdm

from ddtree import Engine, SamplingParams

DEMO_DRAFT = Path(__file__).resolve().parent / "assets" / "smollm2-135m-dflash"
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a Python function that returns the sum of a list of numbers.",
    "Explain in three sentences why the sky is blue.",
)
MODES = ("off", "chain", "tree")
PATIENCE = 45
"""Seconds of measuring after which no further repeat begins."""


def chat_ids(engine: Engine, question: str) -> list[int]:
    """Token ids of a one-question conversation, by the target's own chat template."""
    messages = [{"role": "user", "content": question}]
    text = engine.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    return engine.tokenizer.encode(text, add_special_tokens=False)


def answer(engine: Engine, question: str, max_new_tokens: int) -> None:
    """Print a question and its answer, as the answer is generated."""
    print(f"\n> {question}\n")
    for delta in engine.stream(
        chat_ids(engine, question), SamplingParams(max_new_tokens=max_new_tokens)
    ):
        print(delta.text, end="", flush=True)
    print()


def compare(engine: Engine, questions, max_new_tokens: int, repeats: int) -> list[dict]:
    """Answer every question in every mode, interleaved, and return a row for each mode.

    Tokens and seconds leave out each answer's first token, which comes from the prompt's own
    forward pass. The speed-up is the median, over all answers, of plain seconds / mode seconds.
    """
    prompts = [chat_ids(engine, question) for question in questions]
    outputs: dict[str, list] = {mode: [] for mode in MODES}
    total = repeats * len(prompts) * len(MODES)
    with tqdm(desc="Measuring off, chain and tree", total=total, unit=" answers") as bar:
        for repeat in range(repeats):
            if repeat and bar.format_dict["elapsed"] > PATIENCE:
                break
            for prompt in prompts:
                for mode in MODES:
                    params = SamplingParams(max_new_tokens=max_new_tokens, speculation=mode)
                    outputs[mode] += engine.generate(prompt, params)
                    bar.update()
    plain = outputs["off"]
    rows = []
    for mode in MODES:
        own = outputs[mode]
        rounds = sum(output.stats.rounds for output in own)
        pairs = [(a.stats.decode_seconds, b.stats.decode_seconds) for a, b in zip(plain, own)]
        rows.append(
            {
                "mode": mode,
                "tokens per round": sum(len(o.token_ids) - 1 for o in own) / max(1, rounds),
                "tokens/s": median(output.stats.tokens_per_second for output in own),
                "speedup": median(a / b if b else 1.0 for a, b in pairs),
                "identical": [o.token_ids for o in own] == [o.token_ids for o in plain],
            }
        )
    return rows


def table(rows: list[dict]) -> str:
    """The rows of `compare` as text."""
    lines = ["mode    tokens per round    tokens/s    speedup    identical to plain decoding"]
    for row in rows:
        lines.append(
            f"{row['mode']:<8}{row['tokens per round']:>16.2f}{row['tokens/s']:>12.1f}"
            f"{row['speedup']:>10.2f}x    {'yes' if row['identical'] else 'NO'}"
        )
    return "\n".join(lines)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Stream three chat answers, then compare plain, chain and tree decoding."
    )
    parser.add_argument("--target", help="folder or hub id (default: the demo's chat model)")
    parser.add_argument("--draft", help="folder or hub id of a DFlash drafter made for it")
    parser.add_argument("--budget", type=int, help="tree nodes below the root (default: auto)")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="for each answer")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each answer")
    parser.add_argument(
        "--threads",
        type=int,
        # Half the logical cores: two threads that fight for one core are slower than one.
        default=max(1, min(4, (os.cpu_count() or 2) // 2)),
        help="CPU threads (default: %(default)s)",
    )
    args = parser.parse_args(arguments)
    if (args.target is None) != (args.draft is None):
        parser.error("--target and --draft belong together: a drafter is made for one target")
    for name in ("max_new_tokens", "repeats", "threads"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: expected a positive number")
    return args


def run(args: argparse.Namespace) -> bool:
    """Stream and compare; returns whether every mode's tokens were those of plain decoding."""
    torch.set_num_threads(args.threads)
    target = args.target or str(demo_target())
    print(f"Loading {target}", flush=True)
    start = time.perf_counter()
    with Engine(
        target,
        args.draft or str(DEMO_DRAFT),
        budget="auto" if args.budget is None else args.budget,
    ) as engine:
        about = engine.describe()
        print(
            f"Loaded in {time.perf_counter() - start:.1f} s: {about['dtype']} on "
            f"{about['device']}, trees of at most {about['budget']} nodes below the root"
        )
        for question in QUESTIONS:
            answer(engine, question, args.max_new_tokens)
        print()
        rows = compare(engine, QUESTIONS, args.max_new_tokens, args.repeats)
    print(f"\n{table(rows)}")
    return all(row["identical"] for row in rows)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if a mode's tokens differ, 2 for bad input, 130 for Ctrl-C."""
    args = parse(arguments)
    try:
        return 0 if run(args) else 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
