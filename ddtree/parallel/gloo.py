"""A gloo group that is made by its members alone, and whose waits are left to the caller."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor

FOREVER = timedelta(days=365)
"""gloo's own limit: who waits for a collective here knows better how long that may take."""


class Gloo:
    """Asynchronous collectives among `size` ranks; each returns torch's `Work`.

    `torch.distributed.new_group` names groups by how many a process has made, so ranks with
    different numbers of groups wait for each other for ever; this one is named by its store.

    Args:
        store: a store of its own for the group; all ranks must be about to construct it.
    """

    def __init__(self, store: Any, rank: int, size: int):
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, FOREVER)

    def broadcast(self, x: Tensor) -> Any:
        """Rank 0's `x` to all, in place."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        return self._group.broadcast([x], options)

    def all_reduce(self, x: Tensor, operation: Any) -> Any:
        """All ranks' `x` reduced, in place."""
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        return self._group.allreduce([x], options)

    def all_gather(self, rows: Sequence[Tensor], x: Tensor) -> Any:
        """All ranks' `x` into `rows`, by rank."""
        return self._group.allgather([list(rows)], [x])
