"""The commands, from parsed arguments to the stages that do the work."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ddtree.config import load_draft_config, load_target_config
from ddtree.kernels import get_ops
from ddtree.models.dflash import read_draft_tokens
from ddtree.models.loader import Checkpoint
from ddtree.models.registry import build_target, resolve

from .arguments import folder_name
from .data import count_answers, import_corpus, readable_shards
from .drafter import TrainableDrafter
from .features import add_features
from .layout import check_config, new_config, read_config, shorten, without_shortlist
from .options import TrainOptions
from .prompts import compose, overlap, read_prompts
from .run import RunOptions, check_target, load_finite_weights, prepare, read_about, start
from .target import fingerprint, load_target_weights


def say(text: str) -> None:
    """A line of progress."""
    print(text, flush=True)


def _folders(args: argparse.Namespace) -> tuple[Path, Path]:
    """Work folder and target folder, whose config is readable; sets the thread count on the way."""
    torch.set_num_threads(args.threads)
    work = args.work.expanduser()
    there = next(folder for folder in (work, *work.absolute().parents) if folder.exists())
    if not there.is_dir():
        raise ValueError(f"work: {there} is a file; --work must name a folder")
    target = Path(resolve(args.target, name="target"))
    load_target_config(target)
    return work, target


def _draft(args: argparse.Namespace, work: Path, target: Path) -> tuple[Path, Path | None]:
    """The drafter's folder, and that of the run whose best it is; None where no run is known."""
    draft = args.draft.expanduser() if args.draft else work / "runs" / args.run / "best"
    run, name = draft.resolve().parent, draft.resolve().name
    if name != "best" or not (run / "run.json").exists():
        return draft, None
    check_target(run, target)
    return draft, run


def _context(target: Path) -> int:
    """Positions to make room for: answers and evaluation prompts are short."""
    return min(1024, load_target_config(target).max_position_embeddings)


def _config(args: argparse.Namespace, target: Path) -> tuple[dict, str]:
    """The drafter's config.json and where its weights start: a folder, "target" or ""."""
    if args.init in ("", "target"):
        depth = load_target_config(target).num_layers
        if args.init and args.layers > depth:
            raise ValueError(
                f"layers: with --init target at most the target's own {depth}, got {args.layers}"
            )
        config = new_config(
            target, args.layers, args.block_size, args.taps, args.mask_token, args.intermediate_size
        )
        return config, args.init
    folder = Path(args.init).expanduser().resolve()
    load_draft_config(folder, load_target_config(target))
    return without_shortlist(json.loads((folder / "config.json").read_text())), str(folder)


def corpus(args: argparse.Namespace) -> None:
    """Generate or import; the shards lie in `WORK/corpus`."""
    work, target = _folders(args)
    mark = fingerprint(target)
    if args.import_file:
        if args.prompts or args.compose or args.self_instruct:
            raise ValueError("corpus: --import-file is alone; it answers no prompts")
        vocab, file = load_target_config(target).vocab_size, args.import_file.expanduser()
        if not file.is_file():
            raise ValueError(f"import-file: {file} is not a file")
        try:
            name = args.name or folder_name(file.stem)
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"import-file: {file}: its name {error}; give a --name") from error
        counts = import_corpus(file, work, name, fingerprint=mark, vocab_size=vocab)
        say(f"imported: {dict(counts)}")
        return
    from ddtree import Engine

    from .generate import CorpusOptions, make_corpus

    prompts = read_prompts(args.prompts.expanduser()) if args.prompts else []
    prompts += compose(args.compose, args.seed)
    if not prompts and not args.self_instruct:
        raise ValueError("corpus: give --prompts, --compose or --self-instruct (or --import-file)")
    options = CorpusOptions(
        args.name or "corpus",
        args.max_new_tokens,
        args.shard_prompts,
        args.seed,
        args.minutes,
        args.self_instruct,
    )
    with Engine(
        str(target), max_batch_size=args.batch_size, max_model_len=_context(target)
    ) as engine:
        say(f"corpus: {make_corpus(engine, prompts, work, options, say, mark)}")


def features(args: argparse.Namespace) -> None:
    """Compute missing features with the engine's target model, into `WORK/features`."""
    work, target = _folders(args)
    config, _ = _config(args, target)
    taps = check_config(config, target).target_layer_ids
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build_target(target, get_ops("torch", device), device, dtype, progress=False)
    made = add_features(work, model, taps, fingerprint(target), say)
    say(f"features: {made} shards made")


def train(args: argparse.Namespace) -> None:
    """Train in `WORK/runs/RUN`; the same command again goes on where it stopped."""
    work, target = _folders(args)
    values = {item.name: getattr(args, item.name) for item in fields(TrainOptions)}
    values["reach"] = tuple(values["reach"])
    options = TrainOptions(**values)
    if not options.steps and not options.minutes:
        raise ValueError("train: give --steps or --minutes, so that the run has an end")
    config, init = _config(args, target)
    run = work / "runs" / args.run
    prepare(run, target, config, options, {"init": init})
    start(RunOptions(work, args.run, target, args.processes, args.threads), options)


def shortlist(args: argparse.Namespace) -> None:
    """Let a drafter draft the most frequent tokens of the corpus only."""
    work, target = _folders(args)
    draft, _ = _draft(args, work, target)
    read_config(draft, target)
    vocab = load_target_config(target).vocab_size
    if not 1 <= args.size < vocab:
        raise ValueError(f"shortlist: --size must be from 1 to {vocab - 1}, got {args.size}")
    train, heldout = count_answers(work, vocab, say, fingerprint(target))
    if not train.any():
        raise ValueError(f"shortlist: no answers in {work / 'corpus'} to count tokens in")
    tokens = np.sort(np.argsort(-train, kind="stable")[: args.size])
    shorten(draft, torch.from_numpy(tokens))
    seen, held = (
        f"{counts[tokens].sum() / max(1, counts.sum()):.2%}" for counts in (train, heldout)
    )
    say(f"shortlist: {args.size} tokens, {seen} of the answers, {held} of those held out")
    if unseen := int((train[tokens] == 0).sum()):
        say(f"shortlist: {unseen} of them, those of the lowest ids, are in no answer")
    say("shortlist: calibrate again")


def evaluate(args: argparse.Namespace) -> None:
    """Measure a drafter and write `evaluation.json` and `README.md` beside its weights."""
    from ddtree import Engine

    from .evaluate import measure, write_report
    from .generate import chat_ids

    work, target = _folders(args)
    draft, run = _draft(args, work, target)
    load_finite_weights(TrainableDrafter(read_config(draft, target)), draft)
    prompts = read_prompts(args.prompts.expanduser())
    prompts = prompts[: args.limit] if args.limit else prompts
    began = time.monotonic()
    with Engine(
        str(target),
        str(draft),
        budget=max(args.budgets),
        max_batch_size=args.batch_size,
        max_model_len=_context(target),
    ) as engine:
        ids = [chat_ids(engine, prompt) for prompt in prompts]
        shards = readable_shards(
            work, say, fingerprint(target), load_target_config(target).vocab_size
        )
        trained = [s.prompt for _, sequences in shards for s in sequences]
        known = _known_prompts(prompts, ids, engine.tokenizer, trained, run is not None)
        report = measure(engine, ids, args.max_new_tokens, args.seed, args.budgets)
    report |= {
        "prompts": len(prompts),
        "max_new_tokens": args.max_new_tokens,
        **known,
        "seconds": round(time.monotonic() - began, 1),
    }
    config = json.loads((draft / "config.json").read_text())
    write_report(draft, target.name, {"config": config, "recipe": _recipe(run)}, report, args.name)
    say(json.dumps(report, indent=1))


def calibrate(args: argparse.Namespace) -> None:
    """Measure what the drafter's candidates are worth; write `calibration.json` beside them."""
    from ddtree import Engine

    from .calibrate import answer, fit, record

    work, target = _folders(args)
    draft, _ = _draft(args, work, target)
    config = read_config(draft, target)
    model = TrainableDrafter(config)
    load_finite_weights(model, draft)
    if args.prompts:
        prompts = read_prompts(args.prompts.expanduser())
    else:
        prompts = compose(args.compose, args.seed)
    with Engine(
        str(target), max_batch_size=args.batch_size, max_model_len=_context(target)
    ) as engine:
        answers = answer(engine, prompts, args.max_new_tokens, args.seed)
    cpu = torch.device("cpu")
    features_of = build_target(target, get_ops("torch", cpu), cpu, torch.float32, progress=False)
    folder = Checkpoint(draft, features_of.ops, cpu, torch.float32, strip="model.", progress=False)
    tokens = read_draft_tokens(folder, config, features_of.config.vocab_size)
    records = record(answers, model, features_of, load_target_weights(target), tokens)
    for temperature, found in records.items():
        say(f"temperature {temperature}: {len(found.known)} positions")
    calibration = fit(records)
    calibration.save(draft)
    say(f"written to {draft}: {calibration}")


def _known_prompts(
    prompts: list[str], ids: list[list[int]], tokenizer, corpus: list[np.ndarray], trained: bool
) -> dict[str, Any]:
    """How many evaluation prompts are in the `corpus`, if it is what the drafter was `trained` on,
    and the prompt there that is closest to one of them."""
    turns = _user_turns(tokenizer, corpus)
    found = [overlap(prompt, turns) for prompt in prompts]
    asked = {tuple(prompt.tolist()) for prompt in corpus}
    seen = [tuple(own) in asked or score == 1 for own, (score, _) in zip(ids, found, strict=True)]
    score, text = max(found)
    return {
        "closest_training_prompt": [round(score, 3), text[:200]],
        "prompts_in_training": sum(seen) if corpus and trained else None,
    }


def _user_turns(tokenizer, prompts: list[np.ndarray]) -> list[str]:
    """The prompts of the training corpus, decoded; what all of them begin with is cut off."""
    texts = [tokenizer.decode(p, skip_special_tokens=True) for p in prompts]
    if not texts:
        return []
    shortest, longest = min(texts), max(texts)
    same = 0
    while same < min(len(shortest), len(longest)) and shortest[same] == longest[same]:
        same += 1
    return [text[same:].removesuffix("assistant\n").strip() for text in texts]


def _recipe(run: Path | None) -> dict[str, str]:
    """What the model card says about how the drafter came to be."""
    if run is None:
        return {"training": "not known: no notes of a run lie beside the drafter"}
    try:
        result = json.loads((run / "result.json").read_text())
        return _lines(read_about(run), result)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {"training": "not known: the notes of its run are not complete"}


def _lines(about: dict, result: dict) -> dict[str, str]:
    """The recipe that a run's notes tell."""
    options = result.get("options", about["options"])
    init = {"": "random weights", "target": "the target's last layers"}.get(
        about["init"], f"the weights of {Path(about['init']).name}"
    )
    return {
        "data": f"{result['answer_tokens']} answer tokens of {result['sequences']} answers that "
        "the target gave itself (loops cut, duplicates dropped, prompts for evaluation held out)",
        "started from": init,
        "training": f"{result['step']} steps of {options['batch']} sequences x "
        f"{options['anchors']} blocks on {result['processes']} process(es), "
        f"{result['seconds'] / 60:.0f} minutes, {result['epoch']:.1f} epochs",
        "loss": f"cross-entropy and distillation (share {options['distill']}) over a sampled head, "
        f"depth weights exp(-(d - 1) / {options['gamma']})",
        "optimiser": f"AdamW, learning rate {options['lr']}, averaged weights",
        "held-out proxy": f"{result['chain']:.3f} tokens per round, greedy chain",
    }
