"""The ranks of a torch.distributed group: collectives on the device, messages between the hosts.

What the hosts tell each other goes over a gloo group of its own, so that no host waits for its
device to hear a plan. Waiting is polling: a rank that waits sees within half a second that another
one has failed, takes Ctrl-C, and gives up after the timeout where the wait is part of a step.
"""

from __future__ import annotations

import hashlib
import pickle
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ddtree.parallel.shards import Parallel

FOREVER = timedelta(days=365)
"""gloo's own limit of our groups: idle waits don't expire, others are watched here."""
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The newer name, and the one before."""
HEADER = 256
"""Integers of a message that travel at once: kind, bytes in all, and the first of them."""
LOOK_SECONDS = 0.5
"""How often a waiting rank looks whether another one has failed."""
GRACE_SECONDS = 3.0
"""How long a rank that has lost another one waits for somebody to say why."""


class Group(Parallel):
    """The ranks of `process_group`; see `Parallel`.

    Args:
        timeout: seconds that a wait within a step may take.
        owned: the default group was made for this engine, and goes with it.
    """

    def __init__(self, process_group: Any, device_type: str, timeout: float, owned: bool = False):
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.timeout = timeout
        self._owned = owned
        self._calls = 0
        ranks = dist.get_process_group_ranks(process_group)
        self._host, self._device = (self._gloo(ranks), process_group)
        if device_type == "cpu":
            self._device = self._gloo(ranks)
        elif "nccl" not in dist.get_backend(process_group):
            self._device = dist.new_group(ranks, backend="nccl", use_local_synchronization=True)
        self._polls = device_type == "cpu"
        self._ranks = ranks
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"ddtree/{self._host.group_name}", store)

    @staticmethod
    def _gloo(ranks: list[int]) -> Any:
        return dist.new_group(ranks, FOREVER, "gloo", use_local_synchronization=True)

    # -- on the device ----------------------------------------------------------------------------

    def all_sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, in place."""
        self._done(dist.all_reduce(x, dist.ReduceOp.SUM, self._device, async_op=self._polls))
        return x

    def all_max(self, x: Tensor) -> Tensor:
        """The elementwise maximum of all ranks' `x`, in place."""
        self._done(dist.all_reduce(x, dist.ReduceOp.MAX, self._device, async_op=self._polls))
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' `x [...]`, by rank: `[size, ...]`."""
        out = x.new_empty(self.size, *x.shape)
        flat = out.view(self.size * x.shape[0], *x.shape[1:])
        self._done(_all_gather(flat, x, self._device, async_op=self._polls))
        return out

    def _done(self, work: Any) -> None:
        """On CPU, wait for a collective; elsewhere it is queued like any other device work."""
        if work is not None:
            self._wait(work.is_completed, within_step=True)
            self._finish(work)

    def wait_for(self, event: Any) -> None:
        """Block until the device work before a recorded CUDA event is done."""
        self._wait(event.query, within_step=True)

    # -- on the host ------------------------------------------------------------------------------

    def begin(self, call: str, arguments: Any) -> None:
        """Wait until every rank is at this call, and see that it is the same one everywhere.

        Raises:
            RuntimeError: on every rank: they make different calls, or with other arguments.
        """
        self._calls += 1
        texts = (f"{self._calls} {call}", repr(arguments))
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
        self._broadcast(message)
        if len(values) > room:
            self._broadcast(values[room:].contiguous())

    def receive(self) -> tuple[int, Sequence[int] | bytes]:
        """Wait for what rank 0 sends next, however long that takes."""
        message = torch.zeros(HEADER, dtype=torch.int64)
        self._broadcast(message, within_step=False)
        kind, size, binary = message[:3].tolist()
        count = -(-size // 8) if binary else size
        values, room = message[3 : 3 + count], HEADER - 3
        if count > room:
            rest = torch.zeros(count - room, dtype=torch.int64)
            self._broadcast(rest)
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

    def _broadcast(self, values: Tensor, within_step: bool = True) -> None:
        work = dist.broadcast(values, self._ranks[0], self._host, async_op=True)
        self._wait(work.is_completed, within_step)
        self._finish(work)

    def _gather(self, values: list[int]) -> list[list[int]]:
        """All ranks' `values`, by rank, however long it takes until all are there."""
        mine = torch.tensor(values, dtype=torch.int64)
        out = torch.zeros(self.size * len(values), dtype=torch.int64)
        work = _all_gather(out, mine, self._host, async_op=True)
        self._wait(work.is_completed, within_step=False)
        self._finish(work)
        return out.view(self.size, -1).tolist()

    # -- when something goes wrong ----------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Let the other ranks know that this one cannot go on."""
        if self.failure:
            return
        lost = isinstance(error, LostRankError)
        what = str(error) if lost else f"{type(error).__name__}: {error}"
        self.failure = what if lost else f"rank {self.rank} failed: {what}"
        # The first to say something is the one who knows.
        self._try_store(lambda: self._store.compare_set("failure", "", self.failure))
        if not self._polls and hasattr(self._device, "abort"):
            # Kernels that wait for a lost rank would keep the process from ending.
            self._device.abort()

    def close(self) -> None:
        """Leave the group."""
        if self._owned and dist.is_initialized() and not self.failure:
            dist.destroy_process_group()

    def _wait(self, ready: Any, within_step: bool) -> None:
        """Poll until `ready()`.

        Raises:
            LostRankError: another rank has failed, or within a step the timeout has passed.
        """
        started = looked = time.monotonic()
        pause = 0.0
        while not ready():
            now = time.monotonic()
            if now - looked > LOOK_SECONDS:
                looked = now
                self._look()
            if within_step and now - started > self.timeout:
                missing = self._missing()
                raise LostRankError(
                    f"no answer within {self.timeout:g} s (timeout) during a step{missing}"
                )
            time.sleep(pause)
            pause = min(pause + 2e-5, 1e-3)

    def _finish(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise LostRankError(f"the group is broken{self._missing()}: {error}") from error

    def _look(self) -> None:
        """Raise what another rank has failed with, if one has; answer one that looks for us."""
        if self._try_store(lambda: self._store.check(["failure"])):
            cause = self._try_store(lambda: self._store.get("failure"))
            raise LostRankError(cause.decode() if cause else "another rank failed")
        if self._try_store(lambda: self._store.check(["alarm"])):
            self._answer()

    def _answer(self) -> None:
        self._try_store(lambda: self._store.set(f"here/{self.rank}", "1"))

    def _missing(self) -> str:
        """Which ranks give no sign of life, for the end of a sentence; or raise what failed."""
        self._try_store(lambda: self._store.set("alarm", "1"))
        self._answer()
        until = time.monotonic() + GRACE_SECONDS
        gone = list(range(self.size))
        while gone and time.monotonic() < until:
            time.sleep(0.1)
            self._look()
            keys = [(rank, f"here/{rank}") for rank in gone]
            gone = [
                r for r, key in keys if not self._try_store(lambda k=key: self._store.check([k]))
            ]
        names = ", ".join(map(str, gone))
        return f"; no sign of life from rank {names}" if 0 < len(gone) < self.size else ""

    def _try_store(self, ask: Any) -> Any:
        """What the store says; None where it is gone with the rank that kept it."""
        try:
            return ask()
        except (RuntimeError, ValueError):
            return None


class LostRankError(RuntimeError):
    """Another rank of the group has failed, is gone, or does not answer."""
