"""The host loop, one step late: schedule, launch, then collect the step before."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from ddtree.runtime.graphs import Progress, graph_keys, make_recorder
from ddtree.runtime.kv_cache import bytes_per_token, default_num_pages
from ddtree.runtime.pages import pages_for
from ddtree.runtime.plan import Buckets, Plan
from ddtree.runtime.request import Request
from ddtree.runtime.runner import Runner, Ticket
from ddtree.runtime.scheduler import Scheduler, SchedulerConfig


class Loop:
    """Drives a scheduler and a runner; step k + 1 is launched before step k is read."""

    @classmethod
    def build(
        cls,
        target: Any,
        drafter: Any | None,
        ops: Any,
        *,
        device: torch.device,
        budget: tuple[int, float | None],
        max_batch_size: int,
        max_model_len: int,
        page_size: int,
        num_pages: int | None,
        memory_fraction: float,
        prefill_chunk: int,
        cuda_graphs: bool,
        coupling: bool,
        rejection: bool,
        progress: Progress,
    ) -> Loop:
        """Size the KV pools, capture the decode rounds, and put scheduler and runner together.

        Args:
            target, drafter, ops: built models and their kernel set.
            budget: most nodes below the root, and the threshold that they must reach, where the
                host can tell.
            progress: wraps the keys that are captured, to show a progress bar.

        The other arguments are the engine's own. Where `num_pages` is not given, all rounds are
        captured once against a pool of one page, so that the pool gets what memory they leave.
        """
        block = 1 if drafter is None else drafter.config.block_size
        most, threshold = budget
        if drafter is None or not ops.sees_values:
            threshold = None
        nodes = max(most + 1, block)
        width = pages_for(max_model_len + nodes, page_size)
        captures = cuda_graphs and not rejection and make_recorder(device) is not None
        buckets, keys = Buckets(), []
        if captures:
            narrow = ops.reads_whole_tables
            buckets = Buckets.make(max_batch_size, most, block, width, page_size, narrow)
            keys = graph_keys(buckets, block, page_size, narrow)

        choice = target.config.vocab_size
        if drafter is not None:
            choice = drafter.config.draft_vocab_size or choice

        def runner(pages: int) -> Runner:
            made = Runner.build(
                target,
                drafter,
                ops,
                max_batch_size=max_batch_size,
                page_size=page_size,
                num_pages=pages,
                table_width=width,
                max_nodes=nodes,
                num_candidates=max(1, min(most, choice)),
                device=device,
                prefill_chunk=prefill_chunk,
                coupling=coupling,
                rejection=rejection,
                threshold=threshold,
            )
            recorder = make_recorder(device) if captures else None
            if recorder is not None:
                made.capture(buckets, keys, recorder, progress)
            return made

        if num_pages is None:
            rehearsal = runner(1) if captures else None
            models = [target] if drafter is None else [target, drafter]
            token_bytes = sum(bytes_per_token(model.kv_shape, model.dtype) for model in models)
            num_pages = target.parallel.least(
                default_num_pages(
                    token_bytes, max_batch_size, width, page_size, memory_fraction, device
                )
            )
            if rehearsal is not None:
                del rehearsal
                torch.cuda.empty_cache()
        scheduler = Scheduler(
            SchedulerConfig(
                max_batch_size=max_batch_size,
                page_size=page_size,
                num_pages=num_pages,
                prefill_chunk=prefill_chunk,
                block_size=block,
                table_width=width,
                width_step=max(1, 16 // page_size),
                buckets=buckets,
            )
        )
        loop = cls(scheduler, runner(num_pages))
        loop.ahead = device.type != "cpu"
        return loop

    def __init__(self, scheduler: Scheduler, runner: Runner):
        self.scheduler = scheduler
        self.runner = runner
        self.announce: Callable[[Plan], None] | None = None
        """Told every plan before it is launched: the other ranks launch it, too."""
        self.ahead = True
        """Whether a step is launched before the one before it is read. On CPU a launch is the
        work itself: nothing would be hidden, and every request would end with a round for
        nothing."""
        self._ticket: Ticket | None = None
        self._collecting = 0.0

    def describe(self) -> dict[str, Any]:
        """Settings as they were resolved, and how the decode rounds ran so far."""
        runner, scheduler = self.runner, self.scheduler
        config, target, drafter = scheduler.config, runner.machine.target, runner.machine.drafter
        head = "target's" if target.draft_head is None else "int8"
        return {
            "block_size": config.block_size,
            "max_batch_size": config.max_batch_size,
            "page_size": config.page_size,
            "num_pages": config.num_pages,
            "free_pages": scheduler.pages.free,
            "prefill_chunk": config.prefill_chunk,
            "preemptions": scheduler.preemptions,
            "kernels": runner.machine.ops.name,
            "linear": " + ".join(sorted(runner.machine.ops.packer.in_use)) or "torch",
            "draft_head": None if drafter is None else head,
            "node_threshold": runner.machine.threshold,
            "draft_vocab_size": None if drafter is None else drafter.config.draft_vocab_size,
            "cuda_graphs": 0 if runner.graphs is None else len(runner.graphs),
            "replayed_rounds": runner.rounds["replayed"],
            "eager_rounds": runner.rounds["eager"],
        }

    def step(self) -> None:
        """Launch the next step, if there is one, and collect the one before it, or itself."""
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        if plan is not None and self.announce is not None:
            self.announce(plan)
        ticket = None if plan is None else self.runner.launch(plan)
        previous, self._ticket = self._ticket, ticket
        if previous is None and ticket is None:
            raise RuntimeError(f"{self.scheduler.unfinished} requests are left, and none can run")
        if previous is not None and self.ahead:
            self._collect(previous)
        if ticket is not None and ticket.stage_seconds:
            host = time.perf_counter() - started - ticket.busy_seconds
            ticket.stage_seconds["host"] = host + self._collecting
        if ticket is not None and not self.ahead:
            began, self._ticket = time.perf_counter(), None
            self._collect(ticket)
            self._collecting = time.perf_counter() - began

    def _collect(self, ticket: Ticket) -> None:
        first_tokens, reports = self.runner.read(ticket)
        self.scheduler.collect(ticket.plan, first_tokens, reports, ticket.stage_seconds)

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
