"""Carries plans out on the device, and hands their results to the host one step late."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ddtree.kernels import get_ops
from ddtree.runtime.kv_cache import allocate_pool
from ddtree.runtime.plan import Join, PageEdit, Plan, PrefillChunk, ReportLayout, RowReport
from ddtree.runtime.stats import StageTimer
from ddtree.runtime.step import Machine, decode_step, prefill_step, resume_row, start_row
from ddtree.state import RowState

__all__ = ["Runner", "Ticket", "get_ops"]


@dataclass
class Ticket:
    """A launched step, to be read once the next one is launched."""

    plan: Plan
    buffer: Tensor
    """Host buffer that the step's report is copied to."""
    event: torch.cuda.Event | None
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """Of the decode round, per stage; empty where the host does not wait for the device."""
    busy_seconds: float = 0.0
    """Spent in models and kernels, prefill included, when run eagerly on CPU."""


class Runner:
    """Launches steps without waiting for them.

    Reports alternate between two host buffers: a ticket is valid until the step after the next
    is launched.
    """

    def __init__(self, machine: Machine, rows: RowState, report_size: int):
        self.machine = machine
        self.rows = rows
        self.device = rows.length.device
        self.spare_slot = rows.length.shape[0] - 1
        pinned = self.device.type == "cuda"
        self._buffers = [
            torch.zeros(report_size, dtype=torch.int64, pin_memory=pinned) for _ in range(2)
        ]
        self._launched = 0

    @classmethod
    def build(
        cls,
        target: Any,
        drafter: Any | None,
        ops: Any,
        *,
        max_batch_size: int,
        page_size: int,
        num_pages: int,
        table_width: int,
        max_nodes: int,
        num_candidates: int,
        device: torch.device,
    ) -> Runner:
        """Allocate both KV pools, the device rows and the report buffers.

        Args:
            target, drafter: built models; `drafter` is None for plain decoding only.
            num_pages: usable pages; `table_width`: pages of a block-table row.
            max_nodes: largest N of any round; `num_candidates`: K.
        """

        def pool(model: Any) -> Tensor:
            shape = (model.config.num_layers, model.config.num_kv_heads, model.config.head_dim)
            return allocate_pool(*shape, num_pages, page_size, model.dtype, device)

        machine = Machine(
            target=target,
            drafter=drafter,
            ops=ops,
            target_kv=pool(target),
            draft_kv=None if drafter is None else pool(drafter),
            page_size=page_size,
            num_candidates=num_candidates,
        )
        rows = RowState.allocate(max_batch_size, table_width, device)
        block = 1 if drafter is None else drafter.config.block_size
        report = ReportLayout(block, max(max_nodes, block)).width + 2
        return cls(machine, rows, max_batch_size * report)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Ticket:
        """Start a step; the report is copied to a host buffer behind it."""
        self._join(plan.joins)
        self._edit(plan.edits)
        started = time.perf_counter()
        parts = []
        for chunk in plan.prefills:
            first = self._prefill(chunk)
            if first is not None:
                parts.append(first)
        timer = StageTimer(self.device.type == "cpu")
        if plan.spec is not None:
            slot_ids = self._integers([row.slot for row in plan.rows])
            timer.start()
            report = decode_step(
                self.machine, self.rows, slot_ids, plan.table_width, plan.spec, timer
            )
            parts.append(report.view(-1))
        busy = time.perf_counter() - started
        buffer = self._buffers[self._launched % 2]
        self._launched += 1
        event = None
        if parts:
            flat = torch.cat(parts)
            buffer[: flat.shape[0]].copy_(flat, non_blocking=True)
        if self.device.type == "cuda":
            event = torch.cuda.Event()
            event.record()
        return Ticket(plan, buffer, event, timer.seconds, busy)

    def read(self, ticket: Ticket) -> tuple[list[tuple[int, int]], list[RowReport]]:
        """Wait for a step and read it: first tokens (token, status), and one report per row."""
        if ticket.event is not None:
            ticket.event.synchronize()
        plan = ticket.plan
        firsts = 2 * sum(chunk.emits for chunk in plan.prefills)
        width = plan.layout.width if plan.spec is not None else 0
        values = ticket.buffer[: firsts + width * len(plan.rows)].tolist()
        pairs = list(zip(values[0:firsts:2], values[1:firsts:2], strict=True))
        reports = [
            plan.layout.parse(values[start : start + width])
            for start in range(firsts, len(values), width or 1)
        ]
        return pairs, reports

    # -- pieces of a step -------------------------------------------------------------------------

    def _integers(self, values: list[int]) -> Tensor:
        host = torch.tensor(values, dtype=torch.int64)
        if self.device.type == "cuda":
            host = host.pin_memory()
        return host.to(self.device, non_blocking=True)

    def _join(self, joins: list[Join]) -> None:
        """Write the device rows of requests that start or resume; they stay frozen for now."""
        if not joins:
            return
        rows = self.rows
        stop_width = rows.stop_ids.shape[1]
        table = self._integers(
            [
                value
                for join in joins
                for value in (
                    join.slot,
                    join.limit,
                    join.budget,
                    join.chain,
                    *join.stop_ids,
                    *[-1] * (stop_width - len(join.stop_ids)),
                )
            ]
        ).view(len(joins), -1)
        slots = table[:, 0]
        rows.limit.index_copy_(0, slots, table[:, 1])
        rows.budget.index_copy_(0, slots, table[:, 2])
        rows.chain.index_copy_(0, slots, table[:, 3].bool())
        rows.stop_ids.index_copy_(0, slots, table[:, 4:])
        rows.done.index_fill_(0, slots, True)
        rows.length.index_fill_(0, slots, 0)
        rows.block_table.index_fill_(0, slots, 0)

    def _edit(self, edits: list[PageEdit]) -> None:
        """Write new pages into the block tables, all rows in one go."""
        if not edits:
            return
        width = self.rows.block_table.shape[1]
        where = [e.slot * width + e.start + i for e in edits for i in range(len(e.pages))]
        pages = [page for e in edits for page in e.pages]
        both = self._integers(where + pages).view(2, -1)
        self.rows.block_table.view(-1).index_copy_(0, both[0], both[1])

    def _prefill(self, chunk: PrefillChunk) -> Tensor | None:
        """Run one chunk; returns its first token and status when it emits."""
        slot = self._integers([chunk.slot])
        hidden = prefill_step(
            self.machine,
            self.rows,
            slot,
            self._integers(chunk.tokens)[None],
            chunk.start,
            chunk.table_width,
            chunk.context,
        )
        if not chunk.last:
            return None
        length = chunk.start + len(chunk.tokens)
        if chunk.anchor is not None:
            resume_row(self.rows, slot, length, chunk.anchor)
            return None
        return start_row(self.machine, self.rows, slot, length, hidden)
