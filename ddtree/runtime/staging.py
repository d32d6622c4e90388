"""What travels between host and device in a step: one copy there, one back, never waiting."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ddtree.config.options import MAX_BIASES, MAX_STOP_IDS
from ddtree.parallel import SINGLE
from ddtree.runtime.plan import Join, Plan
from ddtree.state import FLOATS, HEAD_COLUMNS, SCALARS

JOIN_INTEGERS = 1 + HEAD_COLUMNS + len(FLOATS)
BIAS_INTEGERS = 1 + 2 * MAX_BIASES


@dataclass
class Slot:
    """A host buffer, and the event after which the device is through with it."""

    buffer: Tensor
    """Flat int64, page-locked where the device is an accelerator."""
    event: torch.cuda.Event | None
    """None where copies are done when they return."""
    wait_for: Callable[[torch.cuda.Event], None]
    """Blocks until an event has happened."""

    def record(self) -> None:
        """Let `wait` wait for the device work queued so far."""
        if self.event is not None:
            self.event.record()

    def wait(self) -> None:
        """Block until the recorded work is done."""
        if self.event is not None:
            self.wait_for(self.event)


class Ring:
    """Host buffers taken in turn; a buffer is handed out again once the device is through with it.

    With two of them one step may be in flight while the host fills, or reads, the other's.

    Args:
        wait_for: how to wait for an event.
    """

    def __init__(
        self,
        size: int,
        device: torch.device,
        count: int = 2,
        wait_for: Callable[[torch.cuda.Event], None] = SINGLE.wait_for,
    ):
        cuda = device.type == "cuda"
        self.slots = [
            Slot(
                torch.zeros(size, dtype=torch.int64, pin_memory=cuda),
                torch.cuda.Event() if cuda else None,
                wait_for,
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
    """[J, JOIN_INTEGERS] slot, then `Rows.integers` without pages, then the bits of
    `RowState.floats`."""
    biases: Tensor
    """[J', BIAS_INTEGERS] slot, token ids padded with -1, the bits of what is added to their
    logits; of the joining rows that have any."""
    places: Tensor
    """[E] places in the flattened `Rows.integers` that get new pages."""
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

    def __init__(
        self,
        size: int,
        table_width: int,
        device: torch.device,
        wait_for: Callable[[torch.cuda.Event], None] = SINGLE.wait_for,
    ):
        self.ring = Ring(size, device, wait_for=wait_for)
        self.table_width = table_width
        self._device = torch.zeros(size, dtype=torch.int64, device=device)

    @staticmethod
    def capacity(max_batch_size: int, table_pages: int, prefill_chunk: int) -> int:
        """Integers of the largest plan; `table_pages`: entries of all block tables in use."""
        per_row = 2 + JOIN_INTEGERS + BIAS_INTEGERS
        return max_batch_size * per_row + 2 * table_pages + prefill_chunk

    def write(self, plan: Plan, slot_ids: list[int]) -> tuple[Slot, list[int]]:
        """Fill the next host buffer; returns it, and the sizes of its parts."""
        values = list(slot_ids)
        sizes = [len(values)]
        for join in plan.joins:
            values += _integers(join)
        sizes.append(len(plan.joins) * JOIN_INTEGERS)
        biased = [join for join in plan.joins if join.sampling.bias]
        for join in biased:
            values += _biases(join)
        sizes.append(len(biased) * BIAS_INTEGERS)
        edits = plan.edits
        if edits:
            width = HEAD_COLUMNS + self.table_width
            starts = [e.slot * width + HEAD_COLUMNS + e.start for e in edits]
            values += [
                at + i for at, e in zip(starts, edits, strict=True) for i in range(len(e.pages))
            ]
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
        slot_ids, joins, biases, places, pages, *chunks = used.split(sizes)
        joins, biases = joins.view(-1, JOIN_INTEGERS), biases.view(-1, BIAS_INTEGERS)
        return StepInputs(slot_ids, joins, biases, places, pages, chunks)


def floats_of(bits: Tensor) -> Tensor:
    """The float32 numbers whose bits `bits [...]` int64 are."""
    return bits.to(torch.int32).view(torch.float32)


def _integers(join: Join) -> list[int]:
    """The row as it joins: no tokens yet, and frozen."""
    s = join.sampling
    scalars = {
        "length": 0,
        "anchor": 0,
        "done": 1,
        "limit": join.limit,
        "budget": join.budget,
        "chain": int(join.chain),
        "seed": s.seed,
        "top_k": s.top_k,
        "min_end": s.min_end,
    }
    floats = _bits([getattr(s, name) for name in FLOATS])
    stop_ids = [*join.stop_ids, *[-1] * (MAX_STOP_IDS - len(join.stop_ids))]
    return [join.slot, *(scalars[name] for name in SCALARS), *stop_ids, *floats]


def _biases(join: Join) -> list[int]:
    ids, values = zip(*join.sampling.bias, strict=True)
    padding = MAX_BIASES - len(ids)
    return [join.slot, *ids, *[-1] * padding, *_bits([*values, *[0.0] * padding])]


def _bits(values: list[float]) -> list[int]:
    return list(struct.unpack(f"{len(values)}i", struct.pack(f"{len(values)}f", *values)))
