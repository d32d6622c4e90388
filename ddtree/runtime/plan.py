"""What one step does, in integers: made by the scheduler, carried out by the runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Flag, auto
from itertools import pairwise

ROW_RUNNING, ROW_STOPPED, ROW_LENGTH = 0, 1, 2
"""Row status codes of a report: goes on, hit a stop id, hit its token limit."""
NARROWEST = 512
"""Tokens of the narrowest block table that rounds are captured with."""
TOP_LOGPROBS = 20
"""Most likely tokens that are reported beside each emitted one, where logprobs are asked for."""
LOGPROB_WIDTH = 1 + 2 * TOP_LOGPROBS
"""Integers of one token's logprobs in a report: the bits of its own, those of the most likely
tokens' (best first), and their ids."""


class Level(Flag):
    """What a round's sampler does beside argmax: all that any of its rows asks for.

    It costs time, but does not change the tokens of rows that ask for less.
    """

    GREEDY = 0
    NOISE = auto()
    TOP_K = auto()
    TOP_P = auto()
    MIN_P = auto()
    BIAS = auto()
    MIN_TOKENS = auto()
    PENALTIES = auto()
    LOGPROBS = auto()

    FULL = NOISE | TOP_K | TOP_P | MIN_P | BIAS | MIN_TOKENS | PENALTIES


LEVELS = (Level.GREEDY, Level.NOISE, Level.FULL, Level.FULL | Level.LOGPROBS)
"""Levels that captured rounds come in."""


@dataclass(frozen=True)
class DecodeSpec:
    """The static shape of a decode round: everything that a captured round depends on."""

    mode: str
    """``"tree"``, ``"chain"`` or ``"off"``."""
    num_nodes: int
    """N: tree nodes per row, the root included."""
    path_len: int
    """Most tokens that a row can emit in one round: at most the block size, and N."""
    level: Level = Level.GREEDY

    @property
    def layout(self) -> ReportLayout:
        """Columns of the round's report."""
        return ReportLayout(self.path_len, self.num_nodes, Level.LOGPROBS in self.level)


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
    levels: tuple[Level, ...] = ()

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
            levels=LEVELS,
        )

    def round_level(self, level: Level) -> Level:
        """The first of `levels` that has all of `level`."""
        return next((known for known in self.levels if level in known), level)


def round_up(value: int, sizes: tuple[int, ...]) -> int:
    """Round `value` up to one of `sizes` (ascending); without sizes it stays as it is."""
    return next(size for size in sizes if size >= value) if sizes else value


def _doubling(first: int, end: int) -> tuple[int, ...]:
    """`first`, twice that, and so on, as long as `end` is well above."""
    return tuple(first << i for i in range(end.bit_length()) if 4 * (first << i) <= 3 * end)


@dataclass(frozen=True)
class ReportLayout:
    """Columns of a row's report `[B, width]`: written by the step, read by the host.

    First the row's new length, anchor and done, then count, status. A plain round (N = 1) adds the
    anchor that it started from; others the number of nodes, the emitted tokens and the path by
    depth, and tokens, parents and scores of the nodes. Last come the logprobs, if any, by depth.
    """

    path_len: int
    num_nodes: int
    logprobs: bool = False

    @property
    def width(self) -> int:
        """Number of integers per row."""
        tree = 0 if self.num_nodes == 1 else 2 * self.path_len + 3 * self.num_nodes
        return 6 + tree + self.logprobs * self.path_len * LOGPROB_WIDTH

    def parse(self, row: Sequence[int]) -> RowReport:
        """Split one row's integers into their fields."""
        _, anchor, _, count, status, nodes = row[:6]
        cuts = [6]
        for size in (self.path_len, self.path_len, self.num_nodes, self.num_nodes, self.num_nodes):
            cuts.append(cuts[-1] + size)
        if self.num_nodes == 1:
            report = RowReport(status, 1, [anchor][:count], [0][:count], (nodes,), (0,), (0,))
            cuts = [6]
        else:
            emitted, path, tokens, parents, scores = (row[a:b] for a, b in pairwise(cuts))
            report = RowReport(
                status=status,
                num_nodes=nodes,
                emitted=list(emitted[:count]),
                path=list(path[:count]),
                tokens=tokens[:nodes],
                parents=parents[:nodes],
                score_bits=scores[:nodes],
            )
        if self.logprobs:
            starts = range(cuts[-1], cuts[-1] + count * LOGPROB_WIDTH, LOGPROB_WIDTH)
            report.logprobs = [row[start : start + LOGPROB_WIDTH] for start in starts]
        return report


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
    logprobs: list[Sequence[int]] = field(default_factory=list)
    """`LOGPROB_WIDTH` integers per emitted token."""


@dataclass(frozen=True)
class SamplingRow:
    """A request's sampling parameters as its device row has them; by default there are none."""

    level: Level = Level.GREEDY
    seed: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    min_end: int = 0
    bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Join:
    """Device row of a request that starts or resumes."""

    slot: int
    limit: int
    budget: int
    chain: bool
    stop_ids: tuple[int, ...]
    sampling: SamplingRow = SamplingRow()


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
    level: Level = Level.GREEDY
    prompt_len: int = 0
    """Length of the request's own prompt: where `tokens` of a resumed one stop being prompt."""

    @property
    def emits(self) -> bool:
        """Whether the chunk ends with the request's first token."""
        return self.last and self.anchor is None

    @property
    def report_width(self) -> int:
        """Integers that it reports: the first token, the row's status, logprobs if any."""
        return self.emits * (2 + (Level.LOGPROBS in self.level) * LOGPROB_WIDTH)


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
        return self.spec.layout
