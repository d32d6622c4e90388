"""Carries plans out on the device, and hands their results to the host one step late."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ddtree.config.options import MAX_BIASES
from ddtree.kernels import get_ops
from ddtree.runtime.graphs import GraphCache, GraphKey, Progress, Recorder
from ddtree.runtime.kv_cache import allocate_pool
from ddtree.runtime.machine import Machine
from ddtree.runtime.plan import (
    LOGPROB_WIDTH,
    Buckets,
    Join,
    Level,
    Plan,
    PrefillChunk,
    ReportLayout,
    RowReport,
    round_up,
)
from ddtree.runtime.prefill import note_tokens, prefill_step, resume_row, start_row
from ddtree.runtime.sampler import TreeWeights
from ddtree.runtime.staging import Ring, Slot, Staging, StepInputs, floats_of
from ddtree.runtime.stats import StageTimer
from ddtree.runtime.step import decode_step
from ddtree.state import HEAD_COLUMNS, RowState

FirstToken = tuple[int, int, list[int]]
"""A request's first token, the row's status, and `LOGPROB_WIDTH` integers if asked for."""

__all__ = ["Runner", "Ticket", "get_ops"]


@dataclass
class Ticket:
    """A launched step, to be read once the next one is launched."""

    plan: Plan
    report: Slot
    """Where the step's report is copied to."""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """Of the decode round, per stage; empty where the host does not wait for the device."""
    busy_seconds: float = 0.0
    """Spent in models and kernels, prefill included, when run eagerly on CPU."""


class Runner:
    """Launches steps without waiting for them.

    A plan goes to the device in one copy, through a ring of two host buffers; reports come back
    through another: a ticket is valid until the step after the next is launched.
    """

    def __init__(self, machine: Machine, rows: RowState, report_size: int, prefill_chunk: int):
        self.machine = machine
        self.rows = rows
        self.device = rows.length.device
        self.spare_slot, width = rows.length.shape[0] - 1, rows.block_table.shape[1]
        self.buckets = Buckets()
        self.graphs: GraphCache | None = None
        self.rounds = {"replayed": 0, "eager": 0}
        """Decode rounds so far, by how they ran."""
        wait_for = machine.vocab.parallel.wait_for
        self.reports = Ring(report_size, self.device, wait_for=wait_for)
        self.staging = Staging(
            Staging.capacity(self.spare_slot, self.spare_slot * width, prefill_chunk),
            width,
            self.device,
            wait_for,
        )

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
        prefill_chunk: int = 2048,
        coupling: bool = True,
        rejection: bool = False,
        threshold: float | None = None,
    ) -> Runner:
        """Allocate both KV pools, the device rows and the host buffers.

        Args:
            target, drafter: built models; `drafter` is None for plain decoding only.
            num_pages: usable pages; `table_width`: pages of a block-table row.
            max_nodes: largest N of any round; `num_candidates`: K.
            coupling: whether trees of sampled rows are made with the target's noise, and by the
                drafter's calibration where it has one.
            rejection, threshold: see `Machine`.
        """
        block, weights = 1, None
        if drafter is not None:
            block = drafter.config.block_size
            if coupling:
                weights = TreeWeights.make(drafter.config.calibration, block - 1, device)

        def pool(model: Any) -> Tensor:
            shape: tuple[int, int, int] = model.kv_shape
            return allocate_pool(*shape, num_pages, page_size, model.dtype, device)

        machine = Machine(
            target=target,
            drafter=drafter,
            ops=ops,
            target_kv=pool(target),
            draft_kv=None if drafter is None else pool(drafter),
            page_size=page_size,
            num_candidates=num_candidates,
            weights=weights,
            rejection=rejection,
            threshold=threshold,
        )
        rows = RowState.allocate(max_batch_size, table_width, target.vocab.size, device)
        report = ReportLayout(block, max(max_nodes, block), True).width + 2 + LOGPROB_WIDTH
        return cls(machine, rows, max_batch_size * report, prefill_chunk)

    def capture(
        self,
        buckets: Buckets,
        keys: Sequence[GraphKey],
        recorder: Recorder,
        progress: Progress = iter,
    ) -> None:
        """Capture the rounds `keys`; from now on they are replayed, padded to `buckets`.

        No step may have been launched yet.
        """
        self.buckets = buckets
        self.graphs = GraphCache(self.machine, self.rows, keys, recorder, progress)

    @torch.inference_mode()
    def launch(self, plan: Plan) -> Ticket:
        """Start a step; the report is copied to a host buffer behind it."""
        ticket = Ticket(plan, self.reports.take())
        slot_ids = [row.slot for row in plan.rows]
        if slot_ids:
            padding = round_up(len(slot_ids), self.buckets.batch) - len(slot_ids)
            slot_ids += [self.spare_slot] * padding
        self.execute(ticket, *self.staging.write(plan, slot_ids))
        return ticket

    def execute(self, ticket: Ticket, staged: Slot, sizes: list[int]) -> None:
        """Queue a step's device work; nothing of the host's is looked at but the staged copy."""
        plan = ticket.plan
        inputs = self.staging.send(staged, sizes)
        if plan.joins:
            self._join(plan.joins, inputs)
        if plan.edits:
            table = self.rows.integers.view(-1)
            table.index_copy_(0, inputs.places, inputs.pages)
        started = time.perf_counter()
        firsts = []
        for chunk, integers in zip(plan.prefills, inputs.chunks, strict=True):
            first = self._prefill(chunk, integers)
            if first is not None:
                firsts.append(first)
        timer = StageTimer(self.device.type == "cpu")
        report = None if plan.spec is None else self._decode(plan, inputs.slot_ids, timer)
        ticket.busy_seconds = time.perf_counter() - started
        ticket.stage_seconds = timer.seconds
        buffer, offset = ticket.report.buffer, sum(chunk.report_width for chunk in plan.prefills)
        if firsts:
            buffer[:offset].copy_(torch.cat(firsts), non_blocking=True)
        if report is not None:
            used = plan.layout.width * len(plan.rows)
            buffer[offset : offset + used].copy_(report[:used], non_blocking=True)
        ticket.report.record()

    def read(self, ticket: Ticket) -> tuple[list[FirstToken], list[RowReport]]:
        """Wait for a step and read it: first tokens, and one report per row."""
        ticket.report.wait()
        plan = ticket.plan
        sizes = [chunk.report_width for chunk in plan.prefills if chunk.emits]
        width = plan.layout.width if plan.spec is not None else 0
        values = ticket.report.buffer[: sum(sizes) + width * len(plan.rows)].tolist()
        firsts, start = [], 0
        for size in sizes:
            token, status, *logprobs = values[start : start + size]
            firsts.append((token, status, logprobs))
            start += size
        reports = [
            plan.layout.parse(values[at : at + width])
            for at in range(start, len(values), width or 1)
        ]
        return firsts, reports

    # -- pieces of a step -------------------------------------------------------------------------

    def _decode(self, plan: Plan, slot_ids: Tensor, timer: StageTimer) -> Tensor:
        """Run the decode round of `slot_ids [B]`, captured if it can be; its flat report."""
        assert plan.spec is not None
        key = GraphKey(slot_ids.shape[0], plan.table_width, plan.spec)
        if self.graphs is not None and key in self.graphs:
            self.rounds["replayed"] += 1
            return self.graphs.replay(key, slot_ids)
        self.rounds["eager"] += 1
        timer.start()
        report = decode_step(self.machine, self.rows, slot_ids, plan.table_width, plan.spec, timer)
        return report.view(-1)

    def _join(self, joins: Sequence[Join], inputs: StepInputs) -> None:
        """Write the device rows of requests that start or resume; they stay frozen for now."""
        rows, slots = self.rows, inputs.joins[:, 0]
        head, floats = inputs.joins[:, 1 : 1 + HEAD_COLUMNS], inputs.joins[:, 1 + HEAD_COLUMNS :]
        rows.integers[:, :HEAD_COLUMNS].index_copy_(0, slots, head)
        rows.block_table.index_fill_(0, slots, 0)
        rows.floats.index_copy_(0, slots, floats_of(floats))
        rows.bias_ids.index_fill_(0, slots, -1)
        if len(inputs.biases):
            biased, ids = inputs.biases[:, 0], inputs.biases[:, 1 : 1 + MAX_BIASES]
            rows.bias_ids.index_copy_(0, biased, ids)
            values = floats_of(inputs.biases[:, 1 + MAX_BIASES :])
            rows.bias_values.index_copy_(0, biased, values)
        if any(Level.PENALTIES in join.sampling.level for join in joins):
            rows.output_counts.index_fill_(0, slots, 0)
            rows.prompt_seen.index_fill_(0, slots, False)

    def _prefill(self, chunk: PrefillChunk, integers: Tensor) -> Tensor | None:
        """Run one chunk; returns its first token and status, and logprobs, when it emits.

        integers: [1 + T] its slot, then its tokens.
        """
        slot, tokens = integers[:1], integers[None, 1:]
        hidden = prefill_step(
            self.machine,
            self.rows,
            slot,
            tokens,
            chunk.start,
            chunk.table_width,
            chunk.context,
        )
        if Level.PENALTIES in chunk.level:
            first = self.machine.vocab.first
            note_tokens(self.rows, slot, tokens, chunk.start, chunk.prompt_len, first)
        if not chunk.last:
            return None
        length = chunk.start + len(chunk.tokens)
        if chunk.anchor is not None:
            first = self.machine.vocab.first
            resume_row(self.rows, slot, length, chunk.anchor, chunk.level, first)
            return None
        return start_row(self.machine, self.rows, slot, length, hidden, chunk.level)
