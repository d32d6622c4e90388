"""Where a round's time goes."""

from __future__ import annotations

import time

STAGES = ("draft", "build", "verify", "commit")


class StageTimer:
    """Wall-clock marks inside an eager round: `mark(name)` ends the stage `name`.

    On an accelerator the host runs ahead of the device, so marks would measure launches only;
    there the timer stays empty.
    """

    def __init__(self, enabled: bool):
        self.enabled = enabled
        self.seconds: dict[str, float] = {}
        self._last = 0.0

    def start(self) -> None:
        """Begin a round."""
        self.seconds = {}
        self._last = time.perf_counter()

    def mark(self, stage: str) -> None:
        """Credit the time since the last mark to `stage`."""
        if self.enabled:
            now = time.perf_counter()
            self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
            self._last = now
