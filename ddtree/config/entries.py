"""Entries of a checkpoint's config.json, checked: every error names the model and the entry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeGuard


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The object in the file `name` of a checkpoint folder."""
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{folder} is not a checkpoint folder: it has no {name}")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return values


def find_architecture(raw: dict[str, Any], known: tuple[str, ...], role: str) -> str:
    """The first of the architectures named that is known."""
    names = raw.get("architectures") or ["(none in config.json)"]
    for name in names:
        if name in known:
            return name
    remote = "; its auto_map code is never run" if raw.get("auto_map") else ""
    raise ValueError(
        f"{role}: architecture {', '.join(map(str, names))} is not supported, only "
        f"{', '.join(known)}{remote}"
    )


def refuse(values: dict[str, Any], role: str, **neutral: Any) -> None:
    """Refuse options that have another value than the one given here, or none."""
    for name, only in neutral.items():
        if values.get(name) not in (None, only):
            raise ValueError(f"{role}: {name} {values[name]!r} is not supported, only {only!r}")


def is_int(value: Any) -> TypeGuard[int]:
    """Whether `value` is an integer; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def positive(values: dict[str, Any], name: str, role: str) -> int:
    """The entry `name`, an integer >= 1."""
    value = values.get(name)
    if not is_int(value) or value < 1:
        raise ValueError(f"{role}: {name} in config.json must be an integer >= 1, got {value!r}")
    return value


def dtype_name(raw: dict[str, Any]) -> str:
    """Name of the checkpoint's dtype."""
    return str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
