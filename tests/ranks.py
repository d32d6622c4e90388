"""Runs a function on several ranks: in processes of a gloo group, or in threads."""

from __future__ import annotations

import os
import pickle
import queue
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.multiprocessing

import ddtree.engine
from ddtree.parallel import Parallel


@dataclass
class Ended:
    """How one rank ended."""

    exit_code: int | None
    """None: it had to be killed; a negative number is a signal."""
    result: Any = None
    """What its function returned."""
    error: str = ""
    """What it raised: type and message."""
    seconds: float = 0.0
    """Until it ended."""


def run_ranks(
    size: int,
    function: Callable[..., Any],
    *args: Any,
    limit: float = 300.0,
    patience: float = 300.0,
) -> list[Ended]:
    """Call `function(rank, *args)` on every rank of a gloo group; how each one ended.

    function: of a module, so that other processes find it.
    limit: seconds after which ranks are killed.
    patience: the same, from the first rank's end on.
    """
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ddtree-ranks-") as folder:
        processes = [
            context.Process(target=_run, args=(folder, rank, size, function, args))
            for rank in range(size)
        ]
        started = time.monotonic()
        for process in processes:
            process.start()
        ended = [Ended(None) for _ in processes]
        while any(e.exit_code is None for e in ended):
            first = min((e.seconds for e in ended if e.exit_code is not None), default=limit)
            if time.monotonic() - started > min(limit, first + patience):
                break
            for end, process in zip(ended, processes, strict=True):
                if end.exit_code is None and process.exitcode is not None:
                    end.exit_code, end.seconds = process.exitcode, time.monotonic() - started
            time.sleep(0.02)
        for process in processes:
            if process.exitcode is None:
                process.kill()
            process.join()
        for rank, end in enumerate(ended):
            path = Path(folder) / f"rank{rank}"
            if path.exists():
                end.result, end.error = pickle.loads(path.read_bytes())
        return ended


def results(ended: Sequence[Ended]) -> list[Any]:
    """What all ranks returned; fails if one of them did not end well."""
    for rank, end in enumerate(ended):
        assert end.exit_code == 0 and not end.error, f"rank {rank}: {end}"
    return [end.result for end in ended]


def _run(
    folder: str, rank: int, size: int, function: Callable[..., Any], args: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    path = Path(folder) / f"rank{rank}"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    try:
        path.write_bytes(pickle.dumps((function(rank, *args), "")))
    except BaseException as error:
        said = "".join(traceback.format_exception_only(error)).strip()
        path.write_bytes(pickle.dumps((None, said)))
        raise


class ThreadRank(Parallel):
    """One rank of a group whose ranks are threads of this process; see `run_threads`."""

    def __init__(self, rank: int, size: int, meeting: Meeting):
        self.rank, self.size, self._meeting = rank, size, meeting
        self.calls: list[tuple[str, int]] = []
        """Collectives so far: kind, and bytes of this rank."""

    def _all(self, kind: str, x: torch.Tensor) -> torch.Tensor:
        self.calls.append((kind, x.nbytes))
        assert x.is_contiguous()
        found = self._meeting.exchange(self.rank, (kind, x.clone()))
        assert {k for k, _ in found} == {kind} and len({y.shape for _, y in found}) == 1
        return torch.stack([y for _, y in found])

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._all("sum", x).sum(0))

    def all_max(self, x: torch.Tensor) -> torch.Tensor:
        return x.copy_(self._all("max", x).amax(0))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return self._all("gather", x)

    def begin(self, call: str, arguments: Any) -> None:
        said = self._meeting.exchange(self.rank, (call, repr(arguments)))
        assert len(set(said)) == 1, said

    def send(self, kind: int, payload: Any) -> None:
        for inbox in self._meeting.inboxes[1:]:
            inbox.put((kind, payload))

    def receive(self) -> tuple[int, Any]:
        return self._meeting.inboxes[self.rank].get(timeout=60)

    def agree(self, values: dict[str, Any]) -> None:
        said = self._meeting.exchange(self.rank, {k: repr(v) for k, v in values.items()})
        assert all(one == said[0] for one in said)

    def least(self, value: int) -> int:
        return min(self._meeting.exchange(self.rank, value))

    def fail(self, error: BaseException) -> None:
        self.failure = str(error)
        self._meeting.barrier.abort()


class Meeting:
    """Where the threads of a group give each other things."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size, timeout=60)
        self.inboxes: list[queue.Queue] = [queue.Queue() for _ in range(size)]
        self._given: list[Any] = [None] * size

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._given[rank] = value
        self.barrier.wait()
        found = list(self._given)
        self.barrier.wait()
        return found


def run_threads(size: int, function: Callable[[ThreadRank], Any]) -> list[Any]:
    """What `function` returns for each rank of a group of threads.

    Much faster to start than processes. An `Engine(process_group=rank)` runs on that group.
    """
    meeting = Meeting(size)
    ranks = [ThreadRank(rank, size, meeting) for rank in range(size)]
    with (
        mock.patch.object(ddtree.engine, "connect", lambda group, *_: group),
        ThreadPoolExecutor(size) as pool,
    ):
        futures = [pool.submit(_guarded, function, rank) for rank in ranks]
        failed = [f.exception() for f in futures if f.exception() is not None]
        broken = threading.BrokenBarrierError
        for error in sorted(failed, key=lambda e: isinstance(e, broken)):
            raise error
        return [f.result() for f in futures]


def _guarded(function: Callable[[ThreadRank], Any], rank: ThreadRank) -> Any:
    try:
        return function(rank)
    except BaseException:
        rank._meeting.barrier.abort()
        raise
