"""Growing the corpus: the engine's plain decoding answers prompts, shard after shard."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddtree import Engine, SamplingParams

from .data import Filter, Sequence, readable_shards, shards_named, write_shard
from .plan import Plan, digest, read_plan, write_plan

MIX = ((0.0, 0.65), (0.7, 0.2), (1.0, 0.15))
"""Temperatures of the answers, and their shares."""


@dataclass(frozen=True)
class CorpusOptions:
    """What to generate."""

    name: str
    max_new_tokens: int = 256
    shard_prompts: int = 64
    seed: int = 0
    minutes: float = 0.0  # no shard that would end later; 0 = until the prompts are through
    self_instruct: int = 0  # prompts that the target writes itself


def _tokenizer(engine: Engine) -> Any:
    if engine.tokenizer is None:
        raise ValueError("target: its folder has no tokenizer, so prompts cannot be encoded")
    return engine.tokenizer


def chat_ids(engine: Engine, prompt: str) -> list[int]:
    """Token ids of one user turn, up to where the answer begins; plain text without a template."""
    tokenizer = _tokenizer(engine)
    if not tokenizer.chat_template:
        return tokenizer.encode(prompt)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(text, add_special_tokens=False)


def user_header(engine: Engine) -> list[int]:
    """The chat template up to the place where the user's words begin.

    Raises:
        ValueError: the target has no tokenizer, or no template with something before those words.
    """
    tokenizer, marker = _tokenizer(engine), "\u241fuser\u241f"
    text = ""
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": marker}], tokenize=False, add_generation_prompt=True
        )
    header, found, _ = text.partition(marker)
    if not header or not found:
        raise ValueError(
            "self-instruct: the target must have a chat template that puts something before the "
            "user's words; give --prompts or --compose instead"
        )
    return tokenizer.encode(header, add_special_tokens=False)


def self_instruct(engine: Engine, count: int, seed: int) -> list[str]:
    """User turns written by the target itself: it sees the system part and the user header only."""
    header = user_header(engine)
    params = [
        SamplingParams(max_new_tokens=60, temperature=1.0, seed=seed + i) for i in range(count)
    ]
    outputs = engine.generate([header] * count, params, progress=True)
    turns = [output.text.strip() for output in outputs if output.finish_reason == "stop"]
    return list(dict.fromkeys(turn for turn in turns if len(turn) > 8))


def make_corpus(
    engine: Engine,
    prompts: list[str],
    work: Path,
    options: CorpusOptions,
    say: Callable[[str], object] = print,
    fingerprint: int | None = None,
) -> dict[str, Any]:
    """Answer `prompts` into shards `NAME-0000`, ...; goes on behind the shards that are there.

    Progress is one shard: a killed job loses the shard it was at. The prompts, and which of them
    gets which temperature, are the same in every resume, because both are kept in `NAME.json`.

    Args:
        fingerprint: of the engine's target; the shards say that they are for it.

    Returns:
        counts of what the filter did in this call, with `tokens/s`.

    Raises:
        ValueError: there is nothing to answer, a prompt does not fit, or the shards of this name
            were begun with something else.
    """
    plan = _plan(engine, prompts, work, options, fingerprint)
    keep = Filter()
    names = set()
    for name, sequences in readable_shards(work, say, fingerprint):
        keep.remember(sequences)
        names.add(name)
    began, seconds, longest, generated = time.monotonic(), 0.0, 0.0, 0
    size = options.shard_prompts
    chunks = [plan[i : i + size] for i in range(0, len(plan), size)]
    left = [i for i in range(len(chunks)) if f"{options.name}-{i:04d}" not in names]
    for done, index in enumerate(left):
        if options.minutes and seconds + longest > 60 * options.minutes:
            break
        sequences, count = _answer(engine, chunks[index], options, index)
        generated += count
        kept = [s for s in map(keep, sequences) if s is not None]
        if kept:
            path = work / "corpus" / f"{options.name}-{index:04d}.npz"
            write_shard(path, kept, fingerprint)
        before, seconds = seconds, time.monotonic() - began
        longest = max(longest, seconds - before)
        say(
            f"corpus {options.name}-{index:04d}: {len(kept)} of {len(sequences)} kept, "
            f"{generated / seconds:.0f} tok/s, about "
            f"{seconds / (done + 1) * (len(left) - done - 1) / 60:.0f} min left"
        )
    return {**keep.counts, "tokens/s": round(generated / max(seconds, 1e-9), 1)}


def _plan(
    engine: Engine,
    prompts: list[str],
    work: Path,
    options: CorpusOptions,
    fingerprint: int | None,
) -> Plan:
    """Prompt and temperature of every answer, kept on disk for later resumes once all fit."""
    path = work / "corpus" / f"{options.name}.json"
    made_from = {
        "target": fingerprint,
        "prompts": digest(prompts),
        "self_instruct": options.self_instruct,
        "seed": options.seed,
        "shard_prompts": options.shard_prompts,
        "max_new_tokens": options.max_new_tokens,
    }
    plan = read_plan(path, made_from)
    if plan is not None:
        return plan
    if shards_named(work, options.name):
        raise ValueError(
            f"corpus: {path.parent} has shards named {options.name} without a plan {path.name}; "
            "choose another --name"
        )
    check_prompts(engine, prompts)
    if options.self_instruct:
        turns = self_instruct(engine, options.self_instruct, options.seed)
        prompts = prompts + [turn for turn in turns if _misfit(engine, turn) is None]
    if not prompts:
        raise ValueError("corpus: no prompts to answer; give --prompts or --compose")
    shares = np.array([share for _, share in MIX])
    rng = np.random.default_rng(options.seed)
    picks = rng.choice(len(MIX), size=len(prompts), p=shares / shares.sum())
    plan = [(prompt, MIX[pick][0]) for prompt, pick in zip(prompts, picks, strict=True)]
    write_plan(path, made_from, plan)
    return plan


def check_prompts(engine: Engine, prompts: list[str]) -> None:
    """Check that the engine has room for every prompt and a token of its answer.

    Raises:
        ValueError: it has not; the first such prompt is quoted.
    """
    wrong = [(prompt, why) for prompt in prompts if (why := _misfit(engine, prompt))]
    if wrong:
        prompt, why = wrong[0]
        more = f"; and {len(wrong) - 1} more do not fit" if len(wrong) > 1 else ""
        raise ValueError(f"prompts: {prompt[:60]!r} {why}{more}")


def _misfit(engine: Engine, prompt: str) -> str | None:
    """Why the engine cannot answer a prompt, or None."""
    count, most = len(chat_ids(engine, prompt)), engine.max_model_len - 1
    if 0 < count <= most:
        return None
    return f"has {count} tokens; a prompt must have from 1 to {most}"


def _answer(
    engine: Engine, chunk: list[tuple[str, float]], options: CorpusOptions, index: int
) -> tuple[list[Sequence], int]:
    ids = [chat_ids(engine, prompt) for prompt, _ in chunk]
    params = [
        SamplingParams(
            max_new_tokens=options.max_new_tokens,
            speculation="off",
            **({"temperature": t, "seed": options.seed + index * 1000 + i} if t else {}),
        )
        for i, (_, t) in enumerate(chunk)
    ]
    outputs = engine.generate(ids, params)
    sequences = [
        Sequence(np.array(prompt + output.token_ids, np.int64), len(prompt), t)
        for prompt, output, (_, t) in zip(ids, outputs, chunk, strict=True)
        if output.token_ids
    ]
    return sequences, sum(len(output.token_ids) for output in outputs)
