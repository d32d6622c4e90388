"""How many tree nodes a round gets."""

from __future__ import annotations

DEFAULT_BUDGET = {"cpu": 4, "cuda": 63}
"""`budget="auto"` until rounds are measured at run time: a node costs a CPU much more."""


def resolve_budget(budget: int | str, device_type: str) -> int:
    """Turn `Engine(budget=...)` into a number of tree nodes below the root.

    Raises:
        ValueError: the budget is neither "auto" nor a whole number from 0 to 511.
    """
    if budget == "auto":
        return DEFAULT_BUDGET.get(device_type, DEFAULT_BUDGET["cuda"])
    if isinstance(budget, bool) or not isinstance(budget, int) or not 0 <= budget <= 511:
        raise ValueError(f'budget: expected "auto" or a whole number from 0 to 511, got {budget!r}')
    return budget
