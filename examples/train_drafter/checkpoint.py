"""Training state on disk: written atomically, kept in two generations, survives kill -9."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

import torch

NAMES = ("last.pt", "previous.pt")


def lock(folder: Path) -> Any:
    """Claim a run folder for this process, until it ends or the returned file is closed.

    Raises:
        ValueError: another process is training there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = open(folder / ".lock", "w")  # noqa: SIM115 - held open on purpose
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.close()
        raise ValueError(f"run: {folder} is being trained by another process") from error
    return file


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a JSON file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(values, indent=1) + "\n")
    os.replace(temporary, path)


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Write `state` as the newest generation; the one before stays until the new one is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / ".new.pt"
    with open(temporary, "wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    newest, older = (folder / name for name in NAMES)
    if newest.exists():
        os.replace(newest, older)
    os.replace(temporary, newest)


def load_state(folder: Path, warn=print) -> dict[str, Any] | None:
    """The newest readable generation, or None where none was written yet.

    Raises:
        ValueError: there are checkpoints, but none can be read.
    """
    paths = [path for path in (folder / name for name in NAMES) if path.exists()]
    for path in paths:
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except Exception:  # a damaged zip shows as any of a dozen types, with pages of text
            state = None
        if isinstance(state, dict):
            return state
        warn(f"skipped: checkpoint {path} is damaged")
    if paths:
        raise ValueError(
            f"run: all its checkpoints are damaged: {', '.join(map(str, paths))}; delete them to "
            "start the run anew, or choose another --run"
        )
    return None


def best_before(run: Path) -> float:
    """Score of the `best` that an earlier start of a run, whose checkpoints are gone, has left."""
    if not (run / "best" / "model.safetensors").exists():
        return 0.0
    try:
        return float(json.loads((run / "result.json").read_text())["chain"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0
