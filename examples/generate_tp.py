"""Answer prompts with the models divided among all ranks; one process is a group of one.

python examples/generate_tp.py
torchrun --nproc-per-node 3 examples/generate_tp.py
torchrun --nproc-per-node 8 examples/generate_tp.py --target Qwen/Qwen3-8B \
    --draft z-lab/Qwen3-8B-DFlash-b16
"""

import argparse
import sys

from get_demo_model import demo_target
from quickstart import DEMO_DRAFT, QUESTIONS

from ddtree import Engine, SamplingParams


def main() -> None:
    """Generate, and let rank 0 print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", help="folder or hub id; default: the demo's")
    parser.add_argument("--draft", help="folder or hub id; default: the demo's, or none")
    parser.add_argument("--prompt", action="append", help="a question; may be given several times")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--budget", type=int, help="tree nodes below the root")
    args = parser.parse_args()

    draft = args.draft if args.target or args.draft else str(DEMO_DRAFT)
    target = args.target or str(demo_target())
    budget = "auto" if args.budget is None else args.budget
    params = SamplingParams(
        max_new_tokens=args.max_new_tokens, temperature=args.temperature, seed=args.seed
    )
    chats = [[{"role": "user", "content": text}] for text in args.prompt or QUESTIONS]
    try:
        with Engine(target, draft, budget=budget) as engine:
            outputs = engine.chat(chats, params)
            about = engine.describe()
    except ValueError as error:
        sys.exit(f"error: {error}")
    if about["rank"] == 0:
        print(f"{about['tensor_parallel_size']} ranks, {about['dtype']} on {about['device']}")
        for chat, output in zip(chats, outputs, strict=True):
            print(f"\n> {chat[0]['content']}\n\n{output.text}")
        tokens = sum(len(output.token_ids) - 1 for output in outputs)
        rounds = sum(output.stats.rounds for output in outputs)
        print(f"\n{tokens / max(1, rounds):.2f} tokens per round")


if __name__ == "__main__":
    main()
