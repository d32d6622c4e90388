"""What travels between host and device in a step: one copy there, one back, never waiting."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.config.options import MAX_STOP_IDS
from ddtree.runtime.plan import Join, Plan

JOIN_INTEGERS = 4 + MAX_STOP_IDS


@dataclass
class Slot:
    """A host buffer, and the event after which the device is through with it."""

    buffer: Tensor
    """Flat int64, page-locked where the device is an accelerator."""
    event: torch.cuda.Event | None
    """None where copies are done when they return."""

    def record(self) -> None:
        """Let `wait` wait for the device work queued so far."""
        if self.event is not None:
            self.event.record()

    def wait(self) -> None:
        """Block until the recorded work is done."""
        if self.event is not None:
            self.event.synchronize()


class Ring:
    """Host buffers taken in turn; a buffer is handed out again once the device is through with it.

    With two of them one step may be in flight while the host fills, or reads, the other's.
    """

    def __init__(self, size: int, device: torch.device, count: int = 2):
        cuda = device.type == "cuda"
        self.slots = [
            Slot(
                torch.zeros(size, dtype=torch.int64, pin_memory=cuda),
                torch.cuda.Event() if cuda else None,
            )
            for _ in range(count)
        ]
        self._taken = 0

    def take(self) -> Slot:
        """The next buffer; its content is nobody's any more."""
        slot = self.slots[self._taken % len(self.slots)]
        self._taken += 1
        slot.wait()
        return slot


@dataclass
class StepInputs:
    """A step's integers on the device, views of one buffer that the next step overwrites."""

    slot_ids: Tensor
    """[B] device rows of the decode round, padding rows last."""
    joins: Tensor
    """[J, 4 + MAX_STOP_IDS] slot, limit, budget, chain, stop ids padded with -1."""
    places: Tensor
    """[E] entries of the flattened block tables that get new pages."""
    pages: Tensor
    """[E] those pages."""
    chunks: list[Tensor]
    """[1 + T] per prefill chunk: its slot, then its tokens."""


class Staging:
    """Sends a plan to the device in one copy, through a ring of host buffers.

    Args:
        size: integers that a plan may take; see `capacity`.
        table_width: entries of a row's block table.
    """

    def __init__(self, size: int, table_width: int, device: torch.device):
        self.ring = Ring(size, device)
        self.table_width = table_width
        self._device = torch.zeros(size, dtype=torch.int64, device=device)

    @staticmethod
    def capacity(max_batch_size: int, table_pages: int, prefill_chunk: int) -> int:
        """Integers of the largest plan; `table_pages`: entries of all block tables in use."""
        return max_batch_size * (2 + JOIN_INTEGERS) + 2 * table_pages + prefill_chunk

    def write(self, plan: Plan, slot_ids: list[int]) -> tuple[Slot, list[int]]:
        """Fill the next host buffer; returns it, and the sizes of its parts."""
        values = list(slot_ids)
        sizes = [len(values)]
        for join in plan.joins:
            padding = [-1] * (MAX_STOP_IDS - len(join.stop_ids))
            values += _integers(join)
            values += padding
        sizes.append(len(plan.joins) * JOIN_INTEGERS)
        edits = plan.edits
        if edits:
            width = self.table_width
            values += [e.slot * width + e.start + i for e in edits for i in range(len(e.pages))]
            values += [page for e in edits for page in e.pages]
        entries = sum(len(e.pages) for e in edits)
        sizes += [entries, entries]
        for chunk in plan.prefills:
            values.append(chunk.slot)
            values += chunk.tokens
            sizes.append(1 + len(chunk.tokens))
        slot = self.ring.take()
        if values:
            source = torch.frombuffer(array("q", values), dtype=torch.int64)
            slot.buffer[: len(values)].copy_(source)
        return slot, sizes

    def send(self, slot: Slot, sizes: list[int]) -> StepInputs:
        """Queue the copy to the device; the parts are there for whatever is queued next."""
        used = self._device[: sum(sizes)]
        used.copy_(slot.buffer[: sum(sizes)], non_blocking=True)
        slot.record()
        slot_ids, joins, places, pages, *chunks = used.split(sizes)
        return StepInputs(slot_ids, joins.view(-1, JOIN_INTEGERS), places, pages, chunks)


def _integers(join: Join) -> list[int]:
    return [join.slot, join.limit, join.budget, int(join.chain), *join.stop_ids]
