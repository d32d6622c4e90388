"""Decode rounds captured as CUDA graphs, one per shape: a replay is one launch for the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ddtree.runtime.machine import Machine
from ddtree.runtime.plan import Buckets, DecodeSpec, Level
from ddtree.runtime.stats import StageTimer
from ddtree.runtime.step import decode_step
from ddtree.state import RowState

MAX_GRAPHS = 128
"""Graphs of one engine; each takes a few megabytes and a fraction of a second to capture."""
MAX_KEYS = 1 << 17
"""Key positions, over all rows, up to which rounds are captured that read whole block tables."""
WARM_UPS = 2
"""Eager runs before a capture: libraries allocate and kernels are compiled in the first ones."""

Progress = Callable[[Sequence[Any]], Iterable[Any]]
"""Wraps what is iterated over, to show a progress bar."""


@dataclass(frozen=True)
class GraphKey:
    """All that a captured round depends on besides the contents of its buffers."""

    batch: int
    """B, padding rows included."""
    table_width: int
    """Pages of the block tables that the round looks at."""
    spec: DecodeSpec

    @property
    def report_size(self) -> int:
        """Integers of the round's report."""
        return self.batch * self.spec.layout.width

    @property
    def work(self) -> tuple[int, int]:
        """Sorts keys by the memory that their rounds need."""
        tokens = self.batch * (self.spec.num_nodes + self.spec.path_len)
        return tokens * self.table_width, tokens


def graph_keys(buckets: Buckets, block_size: int, page_size: int, narrow: bool) -> list[GraphKey]:
    """The keys to capture, at most `MAX_GRAPHS`.

    Every batch bucket and table width is combined with the shapes that an engine's rounds have:
    the tree of its whole budget, the chain and plain decoding at every sampler level, then smaller
    trees, largest first, at those that most requests have. When there are too many, the last are
    left out; they run eagerly. So do rounds over more than `MAX_KEYS` keys, where the kernel set
    reads whole block tables (`narrow`).

    Args:
        buckets: the sizes in use; `block_size`: the drafter's, 1 without one.
    """
    own, smaller = [DecodeSpec("off", 1, 1)], []
    if block_size > 1:
        trees = [
            DecodeSpec("tree", nodes, min(nodes, block_size)) for nodes in reversed(buckets.nodes)
        ]
        own = [trees[0], DecodeSpec("chain", block_size, block_size), *own]
        smaller = trees[1:]
    levels = buckets.levels or (Level.GREEDY,)
    shapes = [replace(spec, level=level) for level in levels for spec in own]
    shapes += [replace(spec, level=level) for level in levels[:2] for spec in smaller]
    keys = [
        GraphKey(batch, width, shape)
        for shape in shapes
        for width in buckets.widths
        for batch in buckets.batch
        if not narrow or batch * width * page_size <= MAX_KEYS
    ]
    return keys[:MAX_GRAPHS]


@dataclass(frozen=True)
class StaticBuffers:
    """What all captured rounds read from and write to, beside the device rows and KV pools."""

    slot_ids: Tensor
    """[most rows] int64: a round of B rows takes the first B."""
    report: Tensor
    """[largest report] int64, flat: a round of B rows fills the first B * width."""


class Recorder(Protocol):
    """Turns a function of fixed buffers into something that repeats its device work."""

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run it eagerly."""
        ...

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record it; the result repeats the recorded work on what the buffers hold by then."""
        ...


class CudaRecorder:
    """Captures CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run it on the side stream that captures use."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            run()
        current.wait_stream(self._stream)

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Capture it; other threads may use the device meanwhile."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            run()
        return graph.replay


def make_recorder(device: torch.device) -> Recorder | None:
    """The recorder of a device; None on CPU, where every round is a call of the function."""
    return CudaRecorder(device) if device.type == "cuda" else None


class GraphCache:
    """Captured rounds by key, all recorded at construction, the largest first.

    Later captures then fit into the memory of the earlier ones. The device rows must all be
    frozen and their block tables empty: what is run to capture reads and writes the dummy page.

    Args:
        keys: what to capture; everything else is not in the cache (`key in cache`).
        recorder: a fresh one; its memory goes when the cache goes.
    """

    def __init__(
        self,
        machine: Machine,
        rows: RowState,
        keys: Sequence[GraphKey],
        recorder: Recorder,
        progress: Progress = iter,
    ):
        device = rows.length.device
        spare = rows.length.shape[0] - 1
        most_rows = max((key.batch for key in keys), default=0)
        largest = max((key.report_size for key in keys), default=0)
        self.buffers = StaticBuffers(
            slot_ids=torch.full((most_rows,), spare, device=device),
            report=torch.zeros(largest, dtype=torch.int64, device=device),
        )
        self.keys = sorted(keys, key=lambda key: key.work, reverse=True)
        self._replays: dict[GraphKey, Callable[[], None]] = {}
        with torch.inference_mode():
            for key in progress(self.keys):
                run = self._round(machine, rows, key)
                for _ in range(WARM_UPS):
                    recorder.warm_up(run)
                self._replays[key] = recorder.record(run)

    def __contains__(self, key: GraphKey) -> bool:
        return key in self._replays

    def __len__(self) -> int:
        return len(self._replays)

    def replay(self, key: GraphKey, slot_ids: Tensor) -> Tensor:
        """Run the captured round `key` for the rows `slot_ids [B]`; returns its flat report.

        The report is the buffer of all rounds: it must be copied before the next one.
        """
        self.buffers.slot_ids[: key.batch].copy_(slot_ids)
        self._replays[key]()
        return self.buffers.report[: key.report_size]

    def _round(self, machine: Machine, rows: RowState, key: GraphKey) -> Callable[[], None]:
        slot_ids = self.buffers.slot_ids[: key.batch]
        out = self.buffers.report[: key.report_size]
        timer = StageTimer(False)

        def run() -> None:
            report = decode_step(machine, rows, slot_ids, key.table_width, key.spec, timer)
            out.copy_(report.view(-1))

        return run
