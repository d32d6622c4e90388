"""What one step does, in integers: made by the scheduler, carried out by the runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

ROW_RUNNING, ROW_STOPPED, ROW_LENGTH = 0, 1, 2
"""Row status codes of a report: goes on, hit a stop id, hit its token limit."""


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
