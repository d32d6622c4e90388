"""The command line: `python -m examples.train_drafter STAGE ...`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from .arguments import TRAINING, folder_name, home, number, path, seed, whole
from .options import TrainOptions

WORK = Path("~/.cache/ddtree/train")
HELP = {
    "steps": "end after so many steps (0: no such limit)",
    "minutes": "end after so many minutes of processor time, all resumes together (0: no limit)",
    "batch": "sequences per process and step",
    "anchors": "random blocks per sequence",
    "lr": "highest learning rate",
    "warmup": "steps in which the learning rate rises",
    "decay": "last share of the run in which the learning rate falls to zero",
    "dropout": "share of the drafter's activations dropped in training",
    "clip": "largest gradient norm",
    "ema": "decay of the averaged weights, which are the ones that are kept",
    "gamma": "the loss weight of depth d is exp(-(d - 1) / gamma)",
    "distill": "share of distillation at depth 1 of greedy sequences (0: labels only)",
    "distill_fall": "how that share falls per depth",
    "sampled_fall": "how the weight of sampled sequences falls per depth",
    "negatives": "random tokens of the sampled head",
    "common": "most frequent tokens that are always in the sampled head",
    "reach": "context windows of the first stages, such as 4 8 32; then everything",
    "reach_share": "share of the run in which those stages pass",
    "save_seconds": "time between checkpoints",
    "eval_seconds": "time between proxy evaluations",
    "eval_items": "held-out sequences of a proxy evaluation",
    "eval_tokens": "answer tokens of each of them",
}


def parser() -> argparse.ArgumentParser:
    """The arguments of all commands."""
    top = argparse.ArgumentParser(
        prog="python -m examples.train_drafter", description="Train a DFlash drafter for a target."
    )
    commands = top.add_subparsers(dest="command", required=True)

    def command(name: str, about: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(
            name, help=about, formatter_class=argparse.ArgumentDefaultsHelpFormatter
        )
        sub.add_argument(
            "--target", type=home, required=True, help="the target: a folder or a hub id"
        )
        sub.add_argument("--work", type=path, default=WORK, help="where everything is kept")
        sub.add_argument(
            "--threads", type=whole(1, 1024), default=1, help="CPU threads of a process"
        )
        return sub

    corpus = command("corpus", "let the target answer prompts; or import a corpus file")
    corpus.add_argument(
        "--name", type=folder_name, help="name of the new shards; default: corpus, or the file's"
    )
    corpus.add_argument("--prompts", type=path, help="a file with one prompt per line")
    corpus.add_argument(
        "--compose", type=whole(0), default=0, help="prompts of templates and topics"
    )
    corpus.add_argument(
        "--self-instruct", type=whole(0), default=0, help="prompts by the target itself"
    )
    corpus.add_argument("--import-file", type=path, help="an .npz corpus to cut into shards")
    corpus.add_argument("--max-new-tokens", type=whole(1), default=256)
    corpus.add_argument("--shard-prompts", type=whole(1), default=64)
    corpus.add_argument("--batch-size", type=whole(1), default=32, help="answers at the same time")
    corpus.add_argument(
        "--minutes",
        type=number(0),
        default=0.0,
        help="begin no shard that would end later (0: all)",
    )
    corpus.add_argument("--seed", type=seed, default=0)

    features = command("features", "compute the target's features of every shard that has none")
    _layout_options(features)

    train = command("train", "train a drafter, or go on with a run")
    _layout_options(train)
    train.add_argument("--run", type=folder_name, default="default", help="name of the run")
    train.add_argument("--processes", type=whole(1, 1024), default=1)
    for item in fields(TrainOptions):
        flag = "--" + item.name.replace("_", "-")
        kind, text = TRAINING[item.name], HELP.get(item.name, item.name)
        if item.name == "reach":
            train.add_argument(flag, type=kind, nargs="*", default=[], help=text)
        else:
            train.add_argument(flag, type=kind, default=item.default, help=text)

    shortlist = command(
        "shortlist", "draft the most frequent tokens of the corpus only: a smaller head to read"
    )
    shortlist.add_argument("--draft", type=path, help="a drafter folder; default: the run's best")
    shortlist.add_argument(
        "--run", type=folder_name, default="default", help="the run that it comes from"
    )
    shortlist.add_argument("--size", type=int, default=12288, help="how many tokens")

    calibrate = command(
        "calibrate", "fit the weights of draft trees to a drafter; writes calibration.json"
    )
    calibrate.add_argument("--draft", type=path, help="a drafter folder; default: the run's best")
    calibrate.add_argument(
        "--run", type=folder_name, default="default", help="the run that it comes from"
    )
    calibrate.add_argument("--prompts", type=path, help="a file with one prompt per line")
    calibrate.add_argument(
        "--compose", type=whole(1), default=96, help="without --prompts: so many of templates"
    )
    calibrate.add_argument(
        "--max-new-tokens", type=whole(2), default=80, help="tokens of an answer"
    )
    calibrate.add_argument(
        "--batch-size", type=whole(1), default=16, help="answers at the same time"
    )
    calibrate.add_argument("--seed", type=seed, default=4242, help="of prompts and answers")

    evaluate = command("evaluate", "measure tokens per round with the engine; write the model card")
    evaluate.add_argument("--draft", type=path, help="a drafter folder; default: the run's best")
    evaluate.add_argument(
        "--run", type=folder_name, default="default", help="the run that it comes from"
    )
    evaluate.add_argument(
        "--prompts", type=path, default=Path(__file__).with_name("prompts_eval.txt")
    )
    evaluate.add_argument("--max-new-tokens", type=whole(2), default=128)
    evaluate.add_argument("--budgets", type=whole(1), nargs="+", default=[4, 8, 16, 32, 64])
    evaluate.add_argument("--batch-size", type=whole(1), default=8)
    evaluate.add_argument("--limit", type=whole(0), default=0, help="only so many prompts (0: all)")
    evaluate.add_argument("--seed", type=seed, default=0)
    evaluate.add_argument("--name", default="", help="title of the model card")
    return top


def _layout_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument(
        "--init", type=home, default="", help='a drafter folder, or "target" (its last layers)'
    )
    sub.add_argument("--layers", type=whole(1), default=2)
    sub.add_argument("--block-size", type=whole(2), default=6, help="the anchor counts")
    sub.add_argument(
        "--taps", type=whole(0), nargs="*", help="tapped target layers; default: 5, spread"
    )
    sub.add_argument("--mask-token", type=whole(0), help="default: the last id of the vocabulary")
    sub.add_argument("--intermediate-size", type=whole(1), help="default: the target's")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; a mistake in the arguments or the data is one line on stderr."""
    args = parser().parse_args(arguments)
    from . import commands

    try:
        getattr(commands, args.command)(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
