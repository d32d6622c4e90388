"""What one step does, in integers: made by the scheduler, carried out by the runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

ROW_RUNNING, ROW_STOPPED, ROW_LENGTH = 0, 1, 2
"""Row status codes of a report: goes on, hit a stop id, hit its token limit."""
NARROWEST = 512
"""Tokens of the narrowest block table that rounds are captured with."""


@dataclass(frozen=True)
class DecodeSpec:
    """The static shape of a decode round: everything that a captured round depends on."""

    mode: str
    """``"tree"``, ``"chain"`` or ``"off"``."""
    num_nodes: int
    """N: tree nodes per row, the root included."""
    path_len: int
    """Most tokens that a row can emit in one round: the block size, or 1 when off."""


@dataclass(frozen=True)
class Buckets:
    """Sizes that captured rounds come in; a round is rounded up to the next ones.

    A dimension without sizes is not rounded.
    """

    batch: tuple[int, ...] = ()
    """Rows, padding rows included."""
    nodes: tuple[int, ...] = ()
    """N of tree rounds; chain and plain rounds have one size each anyway."""
    widths: tuple[int, ...] = ()
    """Block-table widths, in pages."""

    @classmethod
    def make(
        cls,
        max_batch_size: int,
        budget: int,
        block_size: int,
        table_width: int,
        page_size: int,
        narrow: bool,
    ) -> Buckets:
        """Sizes up to an engine's own.

        Batches are 1, 2, 4, then multiples of 8; nodes powers of two from 4 on, and
        `budget` + 1; widths, where a narrower table saves work (`narrow`), double from
        `NARROWEST` tokens on.
        """
        batches = (1, 2, 4, *range(8, max_batch_size, 8))
        most_nodes = max(budget + 1, block_size)
        widths = _doubling(max(1, NARROWEST // page_size), table_width) if narrow else ()
        return cls(
            batch=(*(size for size in batches if size < max_batch_size), max_batch_size),
            nodes=tuple(sorted({*_doubling(4, most_nodes), budget + 1, most_nodes} - {1})),
            widths=(*widths, table_width),
        )


def round_up(value: int, sizes: tuple[int, ...]) -> int:
    """Round `value` up to one of `sizes` (ascending); without sizes it stays as it is."""
    return next(size for size in sizes if size >= value) if sizes else value


def _doubling(first: int, end: int) -> tuple[int, ...]:
    """`first`, twice that, and so on, as long as `end` is well above."""
    return tuple(first << i for i in range(end.bit_length()) if 4 * (first << i) <= 3 * end)


@dataclass(frozen=True)
class ReportLayout:
    """Columns of a row's report `[B, width]`: written by the step, read by the host."""

    path_len: int
    num_nodes: int

    @property
    def width(self) -> int:
        """Number of integers per row."""
        return 3 + 2 * self.path_len + 3 * self.num_nodes

    def parse(self, row: Sequence[int]) -> RowReport:
        """Split one row's integers into their fields."""
        cuts = [3]
        for size in (self.path_len, self.path_len, self.num_nodes, self.num_nodes, self.num_nodes):
            cuts.append(cuts[-1] + size)
        emitted, path, tokens, parents, scores = (row[a:b] for a, b in pairwise(cuts))
        count, status, nodes = row[:3]
        return RowReport(
            status=status,
            num_nodes=nodes,
            emitted=list(emitted[:count]),
            path=list(path[:count]),
            tokens=tokens[:nodes],
            parents=parents[:nodes],
            score_bits=scores[:nodes],
        )


@dataclass
class RowReport:
    """What one row did in one round."""

    status: int
    num_nodes: int
    emitted: list[int]
    path: list[int] = field(default_factory=list)
    tokens: Sequence[int] = ()
    parents: Sequence[int] = ()
    score_bits: Sequence[int] = ()


@dataclass(frozen=True)
class Join:
    """Device row of a request that starts or resumes."""

    slot: int
    limit: int
    budget: int
    chain: bool
    stop_ids: tuple[int, ...]


@dataclass(frozen=True)
class PageEdit:
    """`pages` go into a row's block table from entry `start` on."""

    slot: int
    start: int
    pages: list[int]


@dataclass(frozen=True)
class PrefillChunk:
    """Prompt tokens of one request that this step runs through the models."""

    request_id: int
    epoch: int
    slot: int
    start: int
    tokens: list[int]
    context: bool
    """Whether the drafter's context rows are written, too."""
    last: bool
    anchor: int | None
    """Set when the request is resumed: its newest token; nothing is emitted then."""
    table_width: int

    @property
    def emits(self) -> bool:
        """Whether the chunk ends with the request's first token."""
        return self.last and self.anchor is None


@dataclass(frozen=True)
class DecodeRow:
    """A request's place in the decode batch."""

    request_id: int
    epoch: int
    slot: int


@dataclass
class Plan:
    """One step: edits of the device rows, then prefill chunks, then one decode round."""

    joins: list[Join]
    edits: list[PageEdit]
    prefills: list[PrefillChunk]
    rows: list[DecodeRow]
    spec: DecodeSpec | None
    table_width: int

    @property
    def layout(self) -> ReportLayout:
        """Columns of the decode report."""
        assert self.spec is not None
        return ReportLayout(self.spec.path_len, self.spec.num_nodes)
