"""Tokens per round of a drafter, measured with the engine, and the model card that says so."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ddtree import Engine, SamplingParams

PROMPTS = Path(__file__).with_name("prompts_eval.txt")
BUDGETS = (4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Score:
    """One mode over all prompts."""

    tokens: list[int]  # emitted by rounds, per prompt (the first token is prefill's)
    rounds: list[int]
    identical: int  # prompts whose tokens equal plain decoding's

    @property
    def per_round(self) -> float:
        return sum(self.tokens) / max(1, sum(self.rounds))

    def interval(self, draws: int = 2000, seed: int = 0) -> tuple[float, float]:
        """95 % bootstrap interval of tokens per round, resampling prompts."""
        rng = np.random.default_rng(seed)
        tokens, rounds = np.array(self.tokens), np.array(self.rounds)
        picks = rng.integers(0, len(tokens), (draws, len(tokens)))
        ratios = tokens[picks].sum(1) / np.maximum(1, rounds[picks].sum(1))
        return float(np.quantile(ratios, 0.025)), float(np.quantile(ratios, 0.975))


def measure(
    engine: Engine,
    prompts: list[list[int]],
    max_new_tokens: int = 128,
    seed: int = 0,
    budgets: Sequence[int] = BUDGETS,
) -> dict[str, dict[str, Any]]:
    """Run prompts (token ids) through chain and trees, greedy and at temperature 1.

    Returns:
        per temperature (`"greedy"`, `"T=1"`) and mode: tokens per round, its 95 % interval, and how
        many prompts gave the same tokens as plain decoding.
    """
    return {
        name: _modes(engine, prompts, max_new_tokens, temperature, seed, budgets)
        for name, temperature in (("greedy", 0.0), ("T=1", 1.0))
    }


def _modes(
    engine: Engine,
    ids: list[list[int]],
    max_new_tokens: int,
    temperature: float,
    seed: int,
    budgets: Sequence[int],
) -> dict[str, dict[str, Any]]:
    def run(**mode: Any) -> list:
        params = [
            SamplingParams(
                max_new_tokens=max_new_tokens,
                **({"temperature": temperature, "seed": seed + i} if temperature else {}),
                **mode,
            )
            for i in range(len(ids))
        ]
        return engine.generate(ids, params)

    plain = run(speculation="off")
    modes: dict[str, dict[str, Any]] = {"chain": {"speculation": "chain"}}
    modes |= {f"tree-{b}": {"speculation": "tree", "budget": b} for b in budgets}
    result = {}
    for name, mode in modes.items():
        outputs = run(**mode)
        score = Score(
            [len(output.token_ids) - 1 for output in outputs],
            [output.stats.rounds for output in outputs],
            sum(a.token_ids == b.token_ids for a, b in zip(outputs, plain, strict=True)),
        )
        low, high = score.interval()
        result[name] = {
            "tokens_per_round": round(score.per_round, 4),
            "interval_95": [round(low, 4), round(high, 4)],
            "rounds": sum(score.rounds),
            "identical_to_plain": f"{score.identical}/{len(ids)}",
        }
    return result


def model_card(name: str, target: str, about: dict[str, Any], report: dict[str, Any]) -> str:
    """The README.md beside a drafter's weights."""
    shape = about["config"]
    nested = shape["dflash_config"]
    lines = [
        f"# {name}",
        "",
        f"A DFlash block drafter for {target}, for speculative decoding with ddtree: "
        f"{shape['num_hidden_layers']} layers, block {shape['block_size']} "
        f"({shape['block_size'] - 1} drafted tokens), taps {nested['target_layer_ids']}, mask id "
        f"{nested['mask_token_id']}, bfloat16. It has no embedding and no head: it uses the "
        "target's.",
        "",
        "## Data and recipe",
        "",
        *(f"- {key}: {value}" for key, value in about["recipe"].items()),
        "",
        "## Scores",
        "",
        f"Tokens per round, bonus token included, on {report['prompts']} chat prompts "
        f"({seen_in_training(report)}), {report['max_new_tokens']} new tokens; 95 % bootstrap "
        "intervals over prompts. Plain decoding is 1.",
        "",
    ]
    for temperature in ("greedy", "T=1"):
        rows = report[temperature]
        lines += [f"| {temperature} | tokens per round | 95 % |", "|---|---|---|"]
        for mode, row in rows.items():
            low, high = row["interval_95"]
            lines.append(f"| {mode} | {row['tokens_per_round']:.2f} | {low:.2f} - {high:.2f} |")
        lines.append("")
    return "\n".join(lines)


def seen_in_training(report: dict[str, Any]) -> str:
    """What is known of the prompts' place in the training corpus."""
    count = report["prompts_in_training"]
    if count is None:
        return "whether they are in its training data is not known"
    if count:
        return f"{count} of them in the training corpus"
    closest = report["closest_training_prompt"][0]
    return f"none of them in the training corpus; the closest there shares {closest:.0%} of words"


def write_report(
    draft: Path, target: str, about: dict[str, Any], report: dict[str, Any], name: str = ""
) -> None:
    """Write `evaluation.json` and the model card `README.md` into the drafter's folder."""
    (draft / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n")
    card = model_card(name or draft.name, target, about, report)
    (draft / "README.md").write_text(card)
