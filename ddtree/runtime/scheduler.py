"""Continuous batching: who runs in the next step, on which pages. Pure host code."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from ddtree.runtime.pages import PageAllocator, pages_for
from ddtree.runtime.plan import (
    Buckets,
    DecodeRow,
    DecodeSpec,
    Join,
    PageEdit,
    Plan,
    PrefillChunk,
    RowReport,
    round_up,
)
from ddtree.runtime.request import FINISHED, PREFILL, RUNNING, WAITING, Request


@dataclass(frozen=True)
class SchedulerConfig:
    """Sizes that the scheduler works within."""

    max_batch_size: int
    page_size: int
    num_pages: int
    prefill_chunk: int
    block_size: int
    """The drafter's block, the anchor included; 1 without a drafter."""
    table_width: int
    """Pages of a full block-table row."""
    width_step: int
    """Block-table widths handed to the step are multiples of this many pages."""
    buckets: Buckets = field(default_factory=Buckets)
    """Sizes of captured rounds; their widths replace the multiples of `width_step`."""


class _NoRoom(Exception):
    """Pages ran out and requests with steps in flight would have to be preempted."""


class Scheduler:
    """Decides each step; the engine alternates `schedule` and `collect`.

    The host reads results one step late, so pages are reserved for what rounds in flight may
    still commit. When pages run out, the youngest request is preempted: its pages are freed, its
    tokens kept, and it is prefilled again later.
    """

    def __init__(self, config: SchedulerConfig):
        self.config = config
        self.pages = PageAllocator(config.num_pages, config.page_size)
        self._slots = list(range(config.max_batch_size - 1, -1, -1))
        self._waiting: deque[Request] = deque()
        self._active: list[Request] = []
        self._by_id: dict[int, Request] = {}
        self._edits: list[PageEdit] = []
        self._epoch = 0
        self.preemptions = 0

    # -- requests in, requests out --------------------------------------------------------------

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self._by_id)

    def max_tokens_per_request(self, scratch: int) -> int:
        """Longest request that the pool could run alone, with `scratch` slots for one round."""
        return self.config.num_pages * self.config.page_size - scratch + 1

    def scratch(self, request: Request) -> int:
        """KV slots beyond the committed ones that a lone round of this request writes to."""
        block = self.config.block_size if request.speculates else 1
        return max(self._spec([request]).num_nodes, block)

    def check(self, request: Request) -> None:
        """Refuse a request that the page pool could not hold even alone.

        Raises:
            ValueError: naming `num_pages`.
        """
        room = self.max_tokens_per_request(self.scratch(request))
        if request.limit > room:
            raise ValueError(
                f"num_pages: the request may grow to {request.limit} tokens, but the page pool "
                f"({self.config.num_pages} pages of {self.config.page_size} tokens) holds {room} "
                f"of it beside the {self.scratch(request)} of a draft; raise num_pages, or lower "
                "max_new_tokens or budget"
            )

    def add(self, request: Request) -> None:
        """Queue a request that `check` let pass; one that wants no tokens is finished."""
        if request.limit == len(request.prompt):
            request.finish_reason = "length"
            request.finish()
            return
        self._by_id[request.id] = request
        self._waiting.append(request)

    def abort(self, request: Request) -> None:
        """Drop a request at any moment; a step in flight for it is ignored when collected."""
        if request.status != FINISHED:
            self._finish(request)

    def abort_all(self) -> None:
        """Drop every request, and count pages and slots anew.

        An interruption may come between any two lines, with a page in nobody's hands.
        """
        self.pages = PageAllocator(self.config.num_pages, self.config.page_size)
        self._slots = list(range(self.config.max_batch_size - 1, -1, -1))
        self._waiting.clear()
        self._active.clear()
        self._edits.clear()
        for request in list(self._by_id.values()):
            request.finish()
        self._by_id.clear()

    def _finish(self, request: Request) -> None:
        if request.status != WAITING:
            self._leave(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        request.finish()
        self._by_id.pop(request.id, None)

    def _leave(self, request: Request) -> None:
        """Take a request out of the batch and free what it holds.

        A step in flight may still write to these pages; the next owner's writes come after it
        on the same stream.
        """
        self._active.remove(request)
        self._edits = [e for e in self._edits if e.slot != request.slot]
        self._slots.append(request.slot)
        self.pages.give_back(request.pages)
        request.pages = []
        request.slot = -1

    # -- the next step --------------------------------------------------------------------------

    def schedule(self) -> Plan | None:
        """Plan the next step; None when there is nothing to do before the last is collected."""
        while True:
            rows = [r for r in self._active if r.status == RUNNING and self._goes_on(r)]
            preempted = self.preemptions
            try:
                self._reserve(rows)
            except _NoRoom:
                return None
            if preempted == self.preemptions:
                break
        joins = self._admit()
        prefills = self._prefill()
        if not rows and not prefills:
            assert not joins
            return None
        spec = self._spec(rows) if rows else None
        most = 0
        for request in rows:
            assert spec is not None
            most = max(most, self._reach(request, spec.num_nodes))
            request.pending += 1
            request.max_pending += spec.path_len
        edits, self._edits = self._edits, []
        return Plan(
            joins=joins,
            edits=edits,
            prefills=prefills,
            rows=[DecodeRow(r.id, r.epoch, r.slot) for r in rows],
            spec=spec,
            table_width=self._round_width(most),
        )

    def _goes_on(self, request: Request) -> bool:
        """False once the steps in flight are sure to reach the request's limit."""
        return request.num_tokens + request.pending < request.limit

    def _nodes(self, request: Request) -> int:
        return 1 + (self.config.block_size - 1 if request.chain else request.budget)

    def _spec(self, rows: list[Request]) -> DecodeSpec:
        """The round's static shape: the widest of its rows, and the most that any samples with."""
        nodes = max(self._nodes(r) for r in rows)
        asked = reduce(or_, (r.sampling.level for r in rows))
        level = self.config.buckets.round_level(asked)
        if nodes == 1:
            return DecodeSpec("off", 1, 1, level)
        if all(r.chain for r in rows):
            return DecodeSpec("chain", nodes, self.config.block_size, level)
        nodes = round_up(nodes, self.config.buckets.nodes)
        return DecodeSpec("tree", nodes, min(nodes, self.config.block_size), level)

    def _reach(self, request: Request, nodes: int) -> int:
        """Slots that a round launched now may touch: what is committed by then, and scratch."""
        committed = min(request.known_len + request.max_pending, request.limit - 1)
        return committed + (max(nodes, self.config.block_size) if nodes > 1 else 1)

    def _width(self, tokens: int) -> int:
        """Block-table width for `tokens` slots, rounded up so that few shapes occur."""
        step = self.config.width_step
        pages = pages_for(max(tokens, 1), self.config.page_size)
        return min(-(-pages // step) * step, self.config.table_width)

    def _round_width(self, tokens: int) -> int:
        """As `_width`, for a decode round."""
        pages = pages_for(max(tokens, 1), self.config.page_size)
        widths = self.config.buckets.widths
        return round_up(pages, widths) if widths else self._width(tokens)

    def _reserve(self, rows: list[Request]) -> None:
        """Give every row the pages that the next round may need, oldest first.

        After a preemption it returns early: the round's shape may have changed.
        """
        if not rows:
            return
        nodes = self._spec(rows).num_nodes
        for request in sorted(rows, key=lambda r: r.id):
            need = pages_for(self._reach(request, nodes), self.config.page_size)
            missing = need - len(request.pages)
            if missing <= 0:
                continue
            if missing > self.pages.free:
                self._preempt_youngest()
                return
            self._grow(request, missing)

    def _grow(self, request: Request, count: int) -> None:
        edit = PageEdit(request.slot, len(request.pages), self.pages.take(count))
        request.pages += edit.pages
        self._edits.append(edit)

    def _preempt_youngest(self) -> None:
        if any(r.pending for r in self._active):
            raise _NoRoom
        victim = max(self._active, key=lambda r: r.id)
        self._leave(victim)
        victim.status = WAITING
        self._waiting.appendleft(victim)
        self.preemptions += 1

    def _admit(self) -> list[Join]:
        joins = []
        while self._waiting and self._slots:
            request = self._waiting[0]
            size = self.config.page_size
            need = pages_for(len(request.prefix) + self.scratch(request), size)
            widest = max((self.scratch(r) for r in [*self._active, request]), default=1)
            headroom = len(self._active) * (pages_for(widest, size) + 1)
            if need + headroom > self.pages.free:
                break
            self._waiting.popleft()
            self._epoch += 1
            request.epoch = self._epoch
            request.slot = self._slots.pop()
            request.status = PREFILL
            request.prefilled = request.known_len = request.pending = request.max_pending = 0
            self._active.append(request)
            budget = self._nodes(request) - 1
            row = (request.slot, request.limit, budget, request.chain, request.stop_ids)
            joins.append(Join(*row, request.sampling))
            self._grow(request, need)
        return joins

    def _prefill(self) -> list[PrefillChunk]:
        """Chunks of the prompts in arrival order, `prefill_chunk` tokens in all."""
        chunks = []
        room = self.config.prefill_chunk
        for request in self._active:
            if request.status != PREFILL or room == 0:
                continue
            prefix = request.prefix
            start = request.prefilled
            tokens = prefix[start : start + room]
            room -= len(tokens)
            request.prefilled += len(tokens)
            last = request.prefilled == len(prefix)
            chunk = PrefillChunk(
                request_id=request.id,
                epoch=request.epoch,
                slot=request.slot,
                start=start,
                tokens=tokens,
                context=request.speculates,
                last=last,
                anchor=request.output[-1] if request.output else None,
                table_width=self._width(start + len(tokens)),
                level=request.sampling.level,
                prompt_len=len(request.prompt),
            )
            chunks.append(chunk)
            if last:
                request.status = RUNNING
                request.known_len = len(prefix)
                request.pending += chunk.emits
        return chunks

    # -- results ----------------------------------------------------------------------------------

    def collect(
        self,
        plan: Plan,
        first_tokens: Sequence[tuple[int, int, Sequence[int]]],
        reports: list[RowReport],
        stage_seconds: dict[str, float],
    ) -> list[Request]:
        """Take a step's results; returns the requests that finished by it.

        Args:
            plan: the step's plan.
            first_tokens: (token, status, logprobs) of every chunk that emits, in order.
            reports: one per decode row.
            stage_seconds: the decode round's stage times.
        """
        finished = []
        chunks = [c for c in plan.prefills if c.emits]
        for chunk, (token, status, logprobs) in zip(chunks, first_tokens, strict=True):
            request = self._current(chunk.request_id, chunk.epoch)
            if request is not None:
                request.pending -= 1
                request.add_first(token, status, logprobs)
                if request.finish_reason:
                    self._finish(request)
                    finished.append(request)
        for row, report in zip(plan.rows, reports, strict=True):
            request = self._current(row.request_id, row.epoch)
            if request is not None:
                assert plan.spec is not None and report.emitted
                request.pending -= 1
                request.max_pending -= plan.spec.path_len
                request.known_len += len(report.emitted)
                request.add_round(report, stage_seconds)
                if request.finish_reason:
                    self._finish(request)
                    finished.append(request)
        return finished

    def _current(self, request_id: int, epoch: int) -> Request | None:
        """The request a result belongs to; None when it has finished or was cancelled."""
        request = self._by_id.get(request_id)
        return request if request is not None and request.epoch == epoch else None
