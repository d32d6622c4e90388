"""Parts of a model's dimensions, and the collectives that put their results together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Part:
    """One rank's range of a dimension that has `total` entries."""

    start: int
    size: int
    total: int

    @classmethod
    def of(cls, dimension: int | Part) -> Part:
        """A dimension that is not divided is one part."""
        return dimension if isinstance(dimension, Part) else cls(0, dimension, dimension)

    @property
    def whole(self) -> bool:
        """Whether it is all of the dimension."""
        return self.size == self.total

    @property
    def slice(self) -> slice:
        """The range as an index."""
        return slice(self.start, self.start + self.size)


class Parallel:
    """A group of ranks that run one engine; this one has a single rank and nothing to say.

    Every rank makes the same calls in the same order. Tensors are contiguous and on the engine's
    device; the results are the same on every rank, bit for bit.
    """

    rank = 0
    size = 1
    failure = ""
    """Why the group can do no more; empty as long as it can."""

    def part(self, total: int, unit: int = 1) -> Part:
        """This rank's part of a dimension of `total` entries, in whole units.

        Parts differ by one unit at most.
        """
        units = total // unit
        start, end = (units * rank // self.size for rank in (self.rank, self.rank + 1))
        return Part(start * unit, (end - start) * unit, total)

    def widest(self, total: int) -> int:
        """Entries of the largest part of a dimension, the same on every rank."""
        return -(-total // self.size)

    def kv_part(self, heads: int, head_dim: int) -> Part:
        """This rank's part of `heads` key/value heads; with more ranks than heads they share."""
        if heads >= self.size:
            return self.part(heads * head_dim, head_dim)
        head = self.rank * heads // self.size
        return Part(head * head_dim, head_dim, heads * head_dim)

    def check_shapes(self, role: str, num_heads: int, num_kv_heads: int, **widths: int) -> None:
        """Refuse a model that this many ranks cannot divide.

        Args:
            role: what errors begin with.
            widths: dimensions that need an entry per rank, by their name in config.json.

        Raises:
            ValueError: naming the dimension.
        """
        ranks = f"{self.size} ranks (process_group)"
        if num_heads % self.size:
            raise ValueError(
                f"{role}: num_attention_heads {num_heads} cannot be divided among {ranks}; the "
                "number of ranks must divide it"
            )
        if num_kv_heads % self.size and self.size % num_kv_heads:
            raise ValueError(
                f"{role}: num_key_value_heads {num_kv_heads} cannot be divided among, or shared "
                f"by, {ranks}; one number must divide the other"
            )
        for name, width in widths.items():
            if width < self.size:
                raise ValueError(f"{role}: {name} {width} is too small for {ranks}")

    # -- on the device ----------------------------------------------------------------------------

    def all_sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' `x`, in place."""
        return x

    def all_max(self, x: Tensor) -> Tensor:
        """The elementwise maximum of all ranks' `x`, in place."""
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """All ranks' `x [...]`, by rank: `[size, ...]`."""
        return x.unsqueeze(0)

    # -- on the host ------------------------------------------------------------------------------

    def begin(self, call: str, arguments: Any) -> None:
        """Wait until every rank is at this call, and see that it is the same one everywhere."""

    def send(self, kind: int, payload: Sequence[int] | bytes) -> None:
        """Tell all other ranks something; rank 0 only."""

    def receive(self) -> tuple[int, Sequence[int] | bytes]:
        """Wait for what rank 0 sends next, however long that takes; others than rank 0 only."""
        raise RuntimeError("a group of one rank has nobody to listen to")

    def agree(self, values: dict[str, Any]) -> None:
        """See that all ranks have the same `values`.

        Raises:
            ValueError: on every rank; the message begins with the first name that differs.
        """

    def least(self, value: int) -> int:
        """The smallest of all ranks' `value`."""
        return value

    def wait_for(self, event: Any) -> None:
        """Block until the device work before a recorded CUDA event is done."""
        event.synchronize()

    def fail(self, error: BaseException) -> None:
        """Let the other ranks know that this one cannot go on."""

    @contextmanager
    def guard(self) -> Iterator[None]:
        """What is raised inside ends the group."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def close(self) -> None:
        """Leave the group."""


SINGLE = Parallel()
"""The group of one rank."""
