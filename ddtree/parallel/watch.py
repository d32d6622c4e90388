"""How the ranks of a group learn of each other's ends: keys in a store, looked up while waiting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
ANSWER_SECONDS = 2.0
"""A store that takes longer is not asked again: it went with the process that kept it."""
GRACE_SECONDS = 3.0
"""How long a rank that has lost another one waits for somebody to say why."""


class LostRankError(RuntimeError):
    """Another rank of the group has failed, is gone, or does not answer."""


class Watch:
    """What one rank knows of the others, by a store of the group's own."""

    def __init__(self, store: Any, rank: int, size: int):
        self._store, self.rank, self.size = store, rank, size
        self._gone = False
        self._closed_seen = False

    def arrive(self, limit: float) -> None:
        """Wait until all ranks are here.

        Raises:
            LostRankError: after `limit` seconds, naming those who are missing.
        """
        self._set(f"arrived/{self.rank}", "1")
        until = time.monotonic() + limit
        missing = list(range(self.size))
        while missing := [rank for rank in missing if not self._has(f"arrived/{rank}")]:
            self.look()
            if time.monotonic() > until or self._gone:
                names = ", ".join(map(str, missing))
                raise LostRankError(f"rank {names} did not construct its engine in {limit:g} s")
            time.sleep(0.05)

    def fail(self, cause: str) -> None:
        """Tell the others; the first to say something is the one who knows."""
        self._ask(lambda: self._store.compare_set("failure", "", cause))

    def leave(self) -> None:
        """Tell the others that this rank makes no more calls."""
        self._set("closed", str(self.rank))

    def look(self, calling: bool = False) -> None:
        """See how the others are, and answer one that looks for us.

        Args:
            calling: whether this rank waits for the others to make the same call.

        Raises:
            LostRankError: one has failed, or, when calling, has closed its engine.
        """
        if self._has("failure"):
            raise LostRankError(self._get("failure") or "another rank failed")
        if self._has("alarm"):
            self._set(f"here/{self.rank}", "1")
        if calling and self._has("closed"):
            if self._closed_seen:
                raise LostRankError(f"rank {self._get('closed')} has closed its engine")
            self._closed_seen = True

    def missing(self) -> str:
        """Which ranks give no sign of life, for the end of a sentence.

        Raises:
            LostRankError: one of them says why.
        """
        self._set("alarm", "1")
        until = time.monotonic() + GRACE_SECONDS
        gone = list(range(self.size))
        while gone and time.monotonic() < until and not self._gone:
            self.look()
            gone = [rank for rank in gone if not self._has(f"here/{rank}")]
            time.sleep(0.1)
        if self._gone:
            return "; the process that kept the store (rank 0, or the launcher) does not answer"
        names = ", ".join(map(str, gone))
        return f"; no sign of life from rank {names}: killed, stopped or at its end" if gone else ""

    # The store is asked in a thread: its own waits cannot be bounded.

    def _ask(self, question: Callable[[], T]) -> T | None:
        if self._gone:
            return None
        found: list[T] = []

        def ask() -> None:
            try:
                found.append(question())
            except (RuntimeError, ValueError):
                found.clear()

        thread = threading.Thread(target=ask, daemon=True)
        thread.start()
        thread.join(ANSWER_SECONDS)
        self._gone = not found
        return found[0] if found else None

    def _set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value) or True)

    def _has(self, key: str) -> bool:
        return bool(self._ask(lambda: self._store.check([key])))

    def _get(self, key: str) -> str:
        return (self._ask(lambda: self._store.get(key)) or b"").decode()
