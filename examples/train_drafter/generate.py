"""Growing the corpus: the engine's plain decoding answers prompts, shard after shard."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddtree import Engine, SamplingParams

from .data import Filter, Sequence, readable_shards, write_shard

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


def chat_ids(engine: Engine, prompt: str) -> list[int]:
    """Token ids of one user turn, up to where the answer begins; plain text without a template."""
    tokenizer = engine.tokenizer
    if tokenizer is None:
        raise ValueError("target: its folder has no tokenizer, so prompts cannot be encoded")
    if not tokenizer.chat_template:
        return tokenizer.encode(prompt)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(text, add_special_tokens=False)


def user_header(engine: Engine) -> list[int]:
    """The chat template up to the place where the user's words begin."""
    marker = "\u241fuser\u241f"
    text = engine.tokenizer.apply_chat_template(
        [{"role": "user", "content": marker}], tokenize=False, add_generation_prompt=True
    )
    return engine.tokenizer.encode(text.split(marker)[0], add_special_tokens=False)


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
) -> dict[str, Any]:
    """Answer `prompts` into shards `NAME-0000`, ...; goes on behind the shards that are there.

    Progress is one shard: a killed job loses the shard it was at. The prompts, and which of them
    gets which temperature, are the same in every resume, because both are kept in `NAME.json`.

    Returns:
        counts of what the filter did in this call, with `tokens/s`.
    """
    plan = _plan(engine, prompts, work, options)
    keep = Filter()
    names = set()
    for name, sequences in readable_shards(work, say):
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
            write_shard(work / "corpus" / f"{options.name}-{index:04d}.npz", kept)
        before, seconds = seconds, time.monotonic() - began
        longest = max(longest, seconds - before)
        say(
            f"corpus {options.name}-{index:04d}: {len(kept)} of {len(sequences)} kept, "
            f"{generated / seconds:.0f} tok/s, about "
            f"{seconds / (done + 1) * (len(left) - done - 1) / 60:.0f} min left"
        )
    return {**keep.counts, "tokens/s": round(generated / max(seconds, 1e-9), 1)}


def _plan(
    engine: Engine, prompts: list[str], work: Path, options: CorpusOptions
) -> list[tuple[str, float]]:
    """Prompt and temperature of every answer, kept on disk for later resumes."""
    path = work / "corpus" / f"{options.name}.json"
    if path.exists():
        return [(prompt, float(t)) for prompt, t in json.loads(path.read_text())]
    if options.self_instruct:
        prompts = prompts + self_instruct(engine, options.self_instruct, options.seed)
    shares = np.array([share for _, share in MIX])
    rng = np.random.default_rng(options.seed)
    picks = rng.choice(len(MIX), size=len(prompts), p=shares / shares.sum())
    plan = [(prompt, MIX[pick][0]) for prompt, pick in zip(prompts, picks, strict=True)]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(plan))
    os.replace(temporary, path)
    return plan


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
