"""The plan of a corpus: every prompt with its temperature, kept with what it was made from."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

Plan = list[tuple[str, float]]

FLAGS = {
    "target": "--target",
    "prompts": "--prompts or --compose",
    "self_instruct": "--self-instruct",
    "seed": "--seed",
    "shard_prompts": "--shard-prompts",
    "max_new_tokens": "--max-new-tokens",
}
"""What a plan is made from, and what that is on the command line."""


def digest(prompts: list[str]) -> str:
    """What stands for the prompts among what a plan is made from."""
    return hashlib.sha256(json.dumps(prompts).encode()).hexdigest()


def read_plan(path: Path, made_from: dict[str, Any]) -> Plan | None:
    """The plan in `path`, or None where there is none yet.

    Raises:
        ValueError: it is damaged, or was made from something else than `made_from`.
    """
    advice = "choose another --name, or delete it and the shards of that name"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(f"corpus: the plan {path} is damaged: {error}; {advice}") from error
    if isinstance(content, list):
        raise ValueError(
            f"corpus: the plan {path} is of an older version and does not say what it was made "
            f"from; {advice}"
        )
    try:
        before = content["made_from"]
        other = [flag for key, flag in FLAGS.items() if before[key] != made_from[key]]
        plan = [(str(prompt), float(temperature)) for prompt, temperature in content["plan"]]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"corpus: the plan {path} is damaged: {error!r}; {advice}") from error
    if other:
        raise ValueError(
            f"corpus: name {path.stem} was begun with another {', another '.join(other)} ({path}); "
            "choose another --name"
        )
    return plan


def write_plan(path: Path, made_from: dict[str, Any], plan: Plan) -> None:
    """Keep a plan, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps({"made_from": made_from, "plan": plan}), encoding="utf-8")
    os.replace(temporary, path)
