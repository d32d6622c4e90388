"""One call of the engine on all ranks: rank 0 does the work, the others follow its steps."""

from __future__ import annotations

import builtins
import pickle
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from ddtree.parallel import Parallel
from ddtree.runtime.loop import Loop
from ddtree.runtime.plan import Plan
from ddtree.runtime.wire import decode_plan, encode_plan

T = TypeVar("T")
PLAN, RESULT, ERROR = range(3)
"""What rank 0 says: carry this step out; this is what the call returns; this is what it raises."""


class Calls:
    """Turns the same call on every rank into one.

    Between `begin` and the result only rank 0 decides: it sends each step's plan before it
    launches the step itself. What it raises before or between steps is raised by all, and the
    engine stays usable; what breaks a step, on any rank, ends the group.
    """

    def __init__(self, parallel: Parallel, loop: Loop):
        self.parallel, self.loop = parallel, loop
        self._busy = threading.Lock()
        self.leads = parallel.rank == 0
        if parallel.size > 1 and self.leads:
            loop.announce = self._announce

    def _announce(self, plan: Plan) -> None:
        self.parallel.send(PLAN, encode_plan(plan))

    def run(self, name: str, arguments: Any, work: Callable[[], T]) -> T:
        """What `work` returns or raises on rank 0, on every rank.

        Args:
            name, arguments: must be the same on every rank; `arguments` by their `repr`.

        Raises:
            RuntimeError: they are not, or the group is broken.
        """
        if self.parallel.size == 1:
            return work()
        if self.parallel.failure:
            raise RuntimeError(f"the ranks of this engine have ended: {self.parallel.failure}")
        if not self._busy.acquire(blocking=False):
            raise RuntimeError(
                f"{name}: another thread is in a call of this engine; on several ranks calls must "
                "come one after the other, in the same order everywhere"
            )
        try:
            return self._together(name, arguments, work)
        finally:
            self._busy.release()

    def _together(self, name: str, arguments: Any, work: Callable[[], T]) -> T:
        parallel = self.parallel
        try:
            parallel.begin(name, arguments)
            if not self.leads:
                return self._follow()
        except _Raised as raised:
            raise raised.error from None
        except BaseException as error:
            self._break(error)
            raise
        try:
            result = work()
        except BaseException as error:
            if not parallel.failure:
                parallel.send(ERROR, pickle.dumps((type(error).__name__, str(error))))
            raise
        parallel.send(RESULT, pickle.dumps(result))
        return result

    def step(self) -> None:
        """A step of rank 0; what breaks it ends the requests, and the group if there are others."""
        try:
            self.loop.step()
        except BaseException as error:
            self._break(error)
            raise

    def _break(self, error: BaseException) -> None:
        self.loop.reset()
        self.parallel.fail(error)

    def _follow(self) -> Any:
        while True:
            kind, payload = self.parallel.receive()
            if kind == PLAN:
                assert not isinstance(payload, bytes)
                self.loop.runner.launch(decode_plan(payload))
                continue
            assert isinstance(payload, bytes)
            content = pickle.loads(payload)
            if kind == RESULT:
                return content
            name, text = content
            kind_of = getattr(builtins, name, RuntimeError)
            raise _Raised(
                kind_of(text)
                if kind_of in (ValueError, TypeError)
                else RuntimeError(f"rank 0 raised {name}: {text}")
            )


class _Raised(Exception):
    """What rank 0 raised without breaking a step."""

    def __init__(self, error: Exception):
        self.error = error
