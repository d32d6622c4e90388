"""How many tree nodes a round gets."""

from __future__ import annotations

AUTO_BUDGET = {"cpu": 8, "cuda": 63}
"""`budget="auto"`: most nodes of a round."""
AUTO_THRESHOLD = {"cpu": 0.07, "cuda": None}
"""And the least probability of being accepted that a node must have. On CPU every node makes the
verification longer, by about this part of a token's time; on a GPU they cost next to nothing."""


def resolve_budget(budget: int | str, device_type: str) -> tuple[int, float | None]:
    """Turn `Engine(budget=...)` into a number of tree nodes below the root and their threshold.

    Raises:
        ValueError: the budget is neither "auto" nor a whole number from 0 to 511.
    """
    if budget == "auto":
        kind = device_type if device_type in AUTO_BUDGET else "cuda"
        return AUTO_BUDGET[kind], AUTO_THRESHOLD[kind]
    if isinstance(budget, bool) or not isinstance(budget, int) or not 0 <= budget <= 511:
        raise ValueError(f'budget: expected "auto" or a whole number from 0 to 511, got {budget!r}')
    return budget, None
