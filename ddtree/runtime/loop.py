"""The host loop, one step late: schedule, launch, then collect the step before."""

from __future__ import annotations

import time

from ddtree.runtime.request import Request
from ddtree.runtime.runner import Runner, Ticket
from ddtree.runtime.scheduler import Scheduler


class Loop:
    """Drives a scheduler and a runner; step k + 1 is launched before step k is read."""

    def __init__(self, scheduler: Scheduler, runner: Runner):
        self.scheduler = scheduler
        self.runner = runner
        self._ticket: Ticket | None = None

    def step(self) -> None:
        """Launch the next step, if there is one, and collect the one before it."""
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        ticket = None if plan is None else self.runner.launch(plan)
        previous, self._ticket = self._ticket, ticket
        if previous is None and ticket is None:
            raise RuntimeError(f"{self.scheduler.unfinished} requests are left, and none can run")
        if previous is not None:
            first_tokens, reports = self.runner.read(previous)
            self.scheduler.collect(previous.plan, first_tokens, reports, previous.stage_seconds)
        if ticket is not None and ticket.stage_seconds:
            host = time.perf_counter() - started - ticket.busy_seconds
            ticket.stage_seconds["host"] = host

    def reset(self) -> None:
        """Drop everything after a failure or an interruption: all requests end as aborted."""
        self._ticket = None
        self.scheduler.abort_all()

    def abort(self, requests: list[Request]) -> None:
        """Cancel the requests that are not finished yet."""
        for request in requests:
            self.scheduler.abort(request)
        if not self.scheduler.unfinished:
            self._ticket = None
