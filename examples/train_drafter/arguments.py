"""What the values of the options may be; argparse names the option before each message."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

LARGEST = 2**31 - 1
LARGEST_SEED = 2**62
"""Each answer has a seed of its own, counted up from the one that is given, below 2**63."""


def whole(least: int, most: int = LARGEST) -> Callable[[str], int]:
    """The type of whole numbers from `least` to `most`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {least} to {most}, got {text!r}"
            )
        return value

    return read


def number(least: float = -math.inf, **other: float) -> Callable[[str], float]:
    """The type of finite numbers of at least `least`, and `most`, `above` or `below` the others."""
    words = {"least": "at least", "most": "at most", "above": "above", "below": "below"}
    bounds = {"least": least, **other}
    asked = [f"{words[key]} {bound:g}" for key, bound in bounds.items() if math.isfinite(bound)]

    def inside(value: float) -> bool:
        return (
            math.isfinite(value)
            and least <= value <= other.get("most", math.inf)
            and other.get("above", -math.inf) < value < other.get("below", math.inf)
        )

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not inside(value):
            raise argparse.ArgumentTypeError(
                f"must be a finite number {' and '.join(asked)}, got {text!r}"
            )
        return value

    return read


def share(text: str) -> float:
    """A number from 0 to 1."""
    return number(0, most=1)(text)


def seed(text: str) -> int:
    """A seed that numpy, torch and the engine all take."""
    return whole(0, LARGEST_SEED)(text)


def folder_name(text: str) -> str:
    """The name of a folder or file within the work folder."""
    if (
        not text
        or text[0] == "."
        or any(c in text for c in "/\\\0")
        or len(os.fsencode(text)) > 200
    ):
        raise argparse.ArgumentTypeError(
            "must be a plain name: not empty, at most 200 bytes, no dot at its beginning and no "
            f"/ or \\ in it; got {text!r}"
        )
    return text


def home(text: str) -> str:
    """A path or something else, `~` expanded."""
    expanded = os.path.expanduser(text)
    if expanded.startswith("~"):
        raise argparse.ArgumentTypeError(f"must be a path, but {text!r} is in no user's home")
    return expanded


def path(text: str) -> Path:
    """A path, `~` expanded."""
    return Path(home(text))


TRAINING: dict[str, Callable[[str], Any]] = {
    "steps": whole(0),
    "minutes": number(0),
    "batch": whole(1),
    "anchors": whole(1),
    "lr": number(0, most=1),
    "warmup": whole(0),
    "decay": share,
    "weight_decay": number(0, most=1000),
    "dropout": number(0, below=1),
    "clip": number(above=0),
    "ema": share,
    "gamma": number(above=0),
    "distill": share,
    "distill_fall": share,
    "sampled_fall": share,
    "negatives": whole(0),
    "common": whole(0),
    "reach": whole(0),
    "reach_share": share,
    "seed": seed,
    "save_seconds": number(0),
    "eval_seconds": number(0),
    "eval_items": whole(0),
    "eval_tokens": whole(1),
}
"""Of each field of `TrainOptions`."""
