"""Plans as integers, to travel from rank 0 to the others; floats travel as their bits."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import astuple, fields
from typing import Any

from ddtree.runtime.plan import (
    DecodeRow,
    DecodeSpec,
    Join,
    Level,
    PageEdit,
    Plan,
    PrefillChunk,
    SamplingRow,
)

MODES = ("off", "chain", "tree")
NONE = -1
"""Stands for None where every number is at least 0."""
_FLOATS = tuple(f.name for f in fields(SamplingRow) if f.type == "float")
_INTEGERS = tuple(f.name for f in fields(SamplingRow) if f.type == "int")


def encode_plan(plan: Plan) -> list[int]:
    """All of a plan as int64 numbers."""
    spec = plan.spec
    out = [plan.table_width, len(plan.joins), len(plan.edits), len(plan.prefills), len(plan.rows)]
    if spec is None:
        out.append(NONE)
    else:
        out += (MODES.index(spec.mode), spec.num_nodes, spec.path_len, spec.level.value)
    for row in plan.rows:
        out += astuple(row)
    for edit in plan.edits:
        out += (edit.slot, edit.start, len(edit.pages), *edit.pages)
    for join in plan.joins:
        out += (join.slot, join.limit, join.budget, join.chain, len(join.stop_ids), *join.stop_ids)
        s = join.sampling
        out += (s.level.value, *(getattr(s, name) for name in _INTEGERS))
        ids, values = zip(*s.bias, strict=True) if s.bias else ((), ())
        out += (len(ids), *ids, *_bits([*(getattr(s, name) for name in _FLOATS), *values]))
    for chunk in plan.prefills:
        anchor = NONE if chunk.anchor is None else chunk.anchor
        out += (chunk.request_id, chunk.epoch, chunk.slot, chunk.start, chunk.context, chunk.last)
        out += (anchor, chunk.table_width, chunk.level.value, chunk.prompt_len)
        out += (len(chunk.tokens), *chunk.tokens)
    return [int(value) for value in out]


def decode_plan(values: Sequence[int]) -> Plan:
    """The plan that `encode_plan` made `values` of."""
    source = iter(values)
    width, joins, edits, chunks, rows = _take(source, 5)
    mode, spec = next(source), None
    if mode != NONE:
        nodes, path, level = _take(source, 3)
        spec = DecodeSpec(MODES[mode], nodes, path, Level(level))
    plan = Plan([], [], [], [], spec, width)
    plan.rows += (DecodeRow(*_take(source, 3)) for _ in range(rows))
    for _ in range(edits):
        slot, start, count = _take(source, 3)
        plan.edits.append(PageEdit(slot, start, _take(source, count)))
    plan.joins += (_join(source) for _ in range(joins))
    plan.prefills += (_chunk(source) for _ in range(chunks))
    return plan


def _join(source: Iterator[int]) -> Join:
    slot, limit, budget, chain, count = _take(source, 5)
    stop_ids, level = tuple(_take(source, count)), Level(next(source))
    named: dict[str, Any] = dict(zip(_INTEGERS, _take(source, len(_INTEGERS)), strict=True))
    ids = _take(source, next(source))
    floats = _numbers(_take(source, len(_FLOATS) + len(ids)))
    named |= zip(_FLOATS, floats, strict=False)
    bias = tuple(zip(ids, floats[len(_FLOATS) :], strict=True))
    row = SamplingRow(level, **named, bias=bias)
    return Join(slot, limit, budget, bool(chain), stop_ids, row)


def _chunk(source: Iterator[int]) -> PrefillChunk:
    request, epoch, slot, start, context, last = _take(source, 6)
    anchor, width, level, prompt, count = _take(source, 5)
    return PrefillChunk(
        request_id=request,
        epoch=epoch,
        slot=slot,
        start=start,
        tokens=_take(source, count),
        context=bool(context),
        last=bool(last),
        anchor=None if anchor == NONE else anchor,
        table_width=width,
        level=Level(level),
        prompt_len=prompt,
    )


def _take(source: Iterator[int], count: int) -> list[int]:
    return [next(source) for _ in range(count)]


def _bits(values: Sequence[float]) -> tuple[int, ...]:
    return struct.unpack(f"{len(values)}q", struct.pack(f"{len(values)}d", *values))


def _numbers(bits: Sequence[int]) -> tuple[float, ...]:
    return struct.unpack(f"{len(bits)}d", struct.pack(f"{len(bits)}q", *bits))
