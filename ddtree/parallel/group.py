"""The ranks of a torch.distributed group: collectives on the device, messages between the hosts.

What the hosts tell each other goes over a gloo group of its own, so that no host waits for its
device to hear a plan. Waiting is polling: a rank that waits sees soon that another one has failed,
takes Ctrl-C, and gives up after the timeout where the wait is part of a step.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import pickle
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddtree.parallel.gloo import Gloo
from ddtree.parallel.shards import Parallel
from ddtree.parallel.watch import LostRankError, Watch

HEADER = 256
"""Integers of a message that travel at once: kind, length, whether bytes, and the first of them."""
LOOK_SECONDS = 0.5
"""How often a waiting rank looks how the others are."""
_made: Counter[str] = Counter()
"""Groups that this process has made, by their ranks."""
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The newer name, and the one before."""


class Group(Parallel):
    """The ranks of `process_group`; see `Parallel`.

    Args:
        timeout: seconds that a wait within a step may take.
        arrival: seconds that ranks may construct their engines apart.

    Raises:
        LostRankError: not all ranks make their group.
    """

    def __init__(self, process_group: Any, device_type: str, timeout: float, arrival: float):
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.timeout = timeout
        self._calls = 0
        self._abandoned = False
        members = "-".join(map(str, dist.get_process_group_ranks(process_group)))
        _made[members] += 1
        store = dist.distributed_c10d._get_default_store()
        store = store.clone() if hasattr(store, "clone") else store

        def part(name: str) -> Any:
            return dist.PrefixStore(f"ddtree/{members}/{_made[members]}/{name}", store)

        self._watch = Watch(part("watch"), self.rank, self.size)
        self._watch.arrive(arrival)
        self._host = Gloo(part("host"), self.rank, self.size)
        self._gloo = Gloo(part("device"), self.rank, self.size) if device_type == "cpu" else None
        self._nccl = process_group
        if device_type != "cpu" and "nccl" not in dist.get_backend(process_group):
            ranks = dist.get_process_group_ranks(process_group)
            self._nccl = dist.new_group(ranks, backend="nccl", use_local_synchronization=True)
        atexit.register(self._exit)

    # -- on the device ----------------------------------------------------------------------------

    def all_sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, in place."""
        return self._all_reduce(x, dist.ReduceOp.SUM)

    def all_max(self, x: Tensor) -> Tensor:
        """The elementwise maximum of all ranks' `x`, in place."""
        return self._all_reduce(x, dist.ReduceOp.MAX)

    def _all_reduce(self, x: Tensor, operation: Any) -> Tensor:
        if self._gloo is None:
            dist.all_reduce(x, operation, self._nccl)
        else:
            self._finish(self._gloo.all_reduce(x, operation))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' `x [...]`, by rank: `[size, ...]`."""
        out = x.new_empty(self.size, *x.shape)
        if self._gloo is None:
            _all_gather(out.view(self.size * x.shape[0], *x.shape[1:]), x, self._nccl)
        else:
            self._finish(self._gloo.all_gather(out.unbind(0), x))
        return out

    def wait_for(self, event: Any) -> None:
        """Block until the device work before a recorded CUDA event is done."""
        self._wait(event.query)

    # -- on the host ------------------------------------------------------------------------------

    def begin(self, call: str, arguments: Any) -> None:
        """Wait until every rank is at this call, and see that it is the same one everywhere.

        Raises:
            RuntimeError: on every rank: they make different calls, or with other arguments.
        """
        self._calls += 1
        # Objects without a text of their own show where they lie, which is nobody else's matter.
        said = re.sub(r"0x[0-9a-f]+", "", repr(arguments))
        texts = (f"{self._calls} {call}", said)
        mine = [int.from_bytes(hashlib.sha256(t.encode()).digest()[:8], "big") >> 1 for t in texts]
        rows = self._gather(mine)
        for rank, theirs in enumerate(rows):
            if theirs != rows[0]:
                what = "gave other arguments" if theirs[0] == rows[0][0] else "made another call"
                raise RuntimeError(
                    f"{call}: rank {rank} {what} than rank 0; all ranks of a group must make the "
                    "same calls with the same arguments"
                )

    def send(self, kind: int, payload: Sequence[int] | bytes) -> None:
        """Tell all other ranks something; rank 0 only."""
        binary = isinstance(payload, bytes)
        size = len(payload)
        if isinstance(payload, bytes):
            padded = bytearray(payload) + bytes(-size % 8 or 8 * (not size))
            values = torch.frombuffer(padded, dtype=torch.int64)
        else:
            values = torch.tensor(payload, dtype=torch.int64)
        message = torch.zeros(HEADER, dtype=torch.int64)
        message[:3] = torch.tensor((kind, size, binary))
        room = HEADER - 3
        message[3 : 3 + len(values)] = values[:room]
        self._finish(self._host.broadcast(message))
        if len(values) > room:
            self._finish(self._host.broadcast(values[room:].contiguous()))

    def receive(self) -> tuple[int, Sequence[int] | bytes]:
        """Wait for what rank 0 sends next, however long that takes."""
        message = torch.zeros(HEADER, dtype=torch.int64)
        self._finish(self._host.broadcast(message), within_step=False)
        kind, size, binary = message[:3].tolist()
        count = -(-size // 8) if binary else size
        values, room = message[3 : 3 + count], HEADER - 3
        if count > room:
            rest = torch.zeros(count - room, dtype=torch.int64)
            self._finish(self._host.broadcast(rest))
            values = torch.cat((values, rest))
        return kind, values.numpy().tobytes()[:size] if binary else values.tolist()

    def agree(self, values: dict[str, Any]) -> None:
        """See that all ranks have the same `values`.

        Raises:
            ValueError: on every rank; the message begins with the first name that differs.
        """
        mine = pickle.dumps({name: repr(value) for name, value in values.items()})
        sizes = [size for (size,) in self._gather([len(mine)])]
        most = -(-max(sizes) // 8) * 8
        padded = torch.frombuffer(bytearray(mine.ljust(most, b"\0")), dtype=torch.int64)
        known = [
            pickle.loads(torch.tensor(row).numpy().tobytes()[:size])
            for row, size in zip(self._gather(padded.tolist()), sizes, strict=True)
        ]
        for rank, theirs in enumerate(known):
            for name, value in known[0].items():
                if theirs.get(name) != value:
                    raise ValueError(
                        f"{name}: rank 0 has {value}, rank {rank} has {theirs.get(name)}; all "
                        "ranks of a group need the same"
                    )

    def least(self, value: int) -> int:
        """The smallest of all ranks' `value`."""
        return min(values[0] for values in self._gather([value]))

    def _gather(self, values: list[int]) -> list[list[int]]:
        """All ranks' `values`, by rank, however long it takes until all are there."""
        mine = torch.tensor(values, dtype=torch.int64)
        out = torch.zeros(self.size, len(values), dtype=torch.int64)
        work = self._host.all_gather(out.unbind(0), mine)
        self._finish(work, within_step=False, calling=True)
        return out.tolist()

    # -- when something goes wrong ----------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Let the other ranks know that this one cannot go on."""
        if self.failure:
            return
        lost = isinstance(error, LostRankError)
        what = str(error) if lost else f"{type(error).__name__}: {error}"
        self.failure = what if lost else f"rank {self.rank} failed: {what}"
        self._watch.fail(self.failure)
        if self._gloo is None and hasattr(self._nccl, "abort"):
            # Kernels that wait for a lost rank would keep the process from ending.
            self._nccl.abort()

    def close(self) -> None:
        """Leave the group."""
        self._watch.leave()

    def _exit(self) -> None:
        """End the process at once where gloo's threads wait for a lost rank, and would for ever."""
        if self._abandoned:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)

    def _finish(self, work: Any, within_step: bool = True, calling: bool = False) -> None:
        """Wait for a collective of the hosts, or of CPU devices."""
        try:
            self._wait(work.is_completed, within_step, calling)
            work.wait()
        except LostRankError:
            self._abandoned = True
            raise
        except RuntimeError as error:
            raise LostRankError(f"the group is broken{self._watch.missing()} ({error})") from error
        except BaseException:
            self._abandoned = True
            raise

    def _wait(
        self, ready: Callable[[], bool], within_step: bool = True, calling: bool = False
    ) -> None:
        """Poll until `ready()`.

        Raises:
            LostRankError: another rank has failed or gone, or within a step the timeout passed.
        """
        started = looked = time.monotonic()
        pause = 0.0
        while not ready():
            now = time.monotonic()
            if now - looked > LOOK_SECONDS:
                self._watch.look(calling)
                looked = time.monotonic()
            if within_step and now - started > self.timeout:
                missing = self._watch.missing()
                raise LostRankError(
                    f"no answer within {self.timeout:g} s (timeout) during a step{missing}"
                )
            time.sleep(pause)
            pause = min(pause + 2e-5, 1e-3)
