"""What a drafter's distributions are worth, depth by depth, as measured on its target."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path

CALIBRATION_FILE = "calibration.json"


@dataclass(frozen=True)
class Calibration:
    """One number per draft depth in each field; docs/sampling.md says what they mean."""

    alpha: tuple[float, ...]
    """Trust in the drafter at temperature > 0: what log q is multiplied by beside the noise."""
    scale: tuple[float, ...]
    """What perturbed scores are divided by to be weights of a tree."""
    hit: tuple[float, ...]
    """Share of the positions at which the right token is among the candidates, in (0, 1]."""
    greedy_scale: tuple[float, ...]
    """As `scale`, for log q alone at temperature 0."""
    greedy_hit: tuple[float, ...]
    """As `hit`, at temperature 0."""

    def save(self, folder: Path) -> None:
        """Write the file beside the drafter's weights in `folder`."""
        values = {f.name: list(getattr(self, f.name)) for f in fields(self)}
        (folder / CALIBRATION_FILE).write_text(json.dumps(values, indent=1) + "\n")


def load_calibration(folder: Path, depth: int) -> Calibration | None:
    """Read the drafter's calibration in `folder`; None where it has no such file.

    Raises:
        ValueError: the file is no object of lists of `depth` numbers in their ranges.
    """
    path = folder / CALIBRATION_FILE
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"draft: {path} is not a file of valid JSON: {error}") from error
    names = [f.name for f in fields(Calibration)]
    if not isinstance(values, dict) or sorted(values) != sorted(names):
        raise ValueError(f"draft: {path} must have the entries {', '.join(names)} and no others")
    for name in names:
        most = 1.0 if name.endswith("hit") else math.inf
        numbers = values[name]
        if (
            not isinstance(numbers, list)
            or len(numbers) != depth
            or not all(_in_range(number, most) for number in numbers)
        ):
            limit = ", at most 1" if most == 1.0 else ""
            raise ValueError(
                f"draft: {name} in {path} must be {depth} numbers > 0{limit}, one per depth, got "
                f"{numbers!r}"
            )
    return Calibration(**{name: tuple(map(float, values[name])) for name in names})


def _in_range(number: object, most: float) -> bool:
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return False
    return 0 < number <= most and number < math.inf
