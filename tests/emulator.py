"""A CUDA graph without CUDA: records a function's ops, and repeats them on the same storages.

And a drafter that can be captured although it knows the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from stubs import FULL, _ranked_rows
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = {"_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "is_same_size"}
"""Ops that bring a value to the host."""
SHAPES = {
    "nonzero",
    "nonzero_numpy",
    "masked_select",
    "unique_dim",
    "_unique2",
    "unique_consecutive",
}
"""Ops whose output's shape depends on the data."""
LITERALS = {"lift_fresh", "lift_fresh_copy"}
"""Ops that bring host data to the device: a graph would copy from memory that is gone."""
HOST_METHODS = {"tolist", "numpy", "item", "cpu", "__array__"}
HOST_METHODS |= {"__bool__", "__int__", "__float__", "__index__"}


class NotCapturable(RuntimeError):
    """The recorded function did something that a CUDA graph cannot hold."""


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _storage(tensor: Tensor) -> int:
    # Prepacked CPU weights have a layout of their own, and no storage to look at.
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage()._cdata


class _NoHost(TorchFunctionMode):
    """Refuses tensor methods that read memory without an op, on CPU tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in HOST_METHODS:
            raise NotCapturable(f"Tensor.{name} reads a value on the host")
        return func(*args, **(kwargs or {}))


class _Tape(TorchDispatchMode):
    """Writes down every op, and what must be done to repeat it."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, list[Tensor]]] = []
        """(op, args, kwargs, outputs to be written anew) of ops that do work."""
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in READS or name in SHAPES or name in LITERALS:
            raise NotCapturable(f"{func}: {'new host data' if name in LITERALS else 'a sync'}")
        if name in ("index", "index_put", "index_put_") and any(
            index.dtype in (torch.bool, torch.uint8) for index in _tensors(args[1])
        ):
            raise NotCapturable(f"{func}: boolean indexing has to count first")
        out = func(*args, **kwargs)
        self.ops += 1
        known = {_storage(t) for t in _tensors((args, kwargs))}
        if func._schema.is_mutable:
            self.steps.append((func, args, kwargs, []))
        else:
            # An output in an argument's storage is a view: it changes as the argument does.
            fresh = [t for t in _tensors(out) if _storage(t) not in known]
            if fresh and not name.startswith(("empty", "new_empty")):
                assert len(fresh) == len(list(_tensors(out)))
                self.steps.append((func, args, kwargs, fresh))
        return out


class Emulator:
    """A `Recorder` for CPU tensors.

    A replay runs no Python of the recorded function: every op again, on the very tensors that it
    was recorded with, its results written into the storages of the first time. Whatever the
    function computed on the host is as it was when it was recorded.
    """

    def __init__(self) -> None:
        self.recorded = self.replayed = 0
        self.ops: list[int] = []
        """Ops dispatched by each recorded function."""

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record `run`; unlike a real capture this also runs it.

        Raises:
            NotCapturable: it reads device data on the host, or needs new host data.
        """
        tape = _Tape()
        with _NoHost(), tape:
            run()
        self.recorded += 1
        self.ops.append(tape.ops)

        @torch.inference_mode()
        def replay() -> None:
            self.replayed += 1
            for func, args, kwargs, outputs in tape.steps:
                result = func(*args, **kwargs)
                for old, new in zip(outputs, _tensors(result) if outputs else (), strict=True):
                    old.copy_(new)

        return replay


class KnownDrafter:
    """As `stubs.Stub`, in tensor ops only: continuations are looked up in a table on the device.

    Args:
        target, inner: the models whose round it drafts for, and the drafter that it wraps; where
            nothing is known, the inner drafter's hidden states stand.
        sequences: (prompt length, prompt + output) of the known requests.
        ranks: at position p the right token comes `ranks[p % len(ranks)]`-th; None: by chance.
        rows: the target's ranked rows (`stubs._ranked_rows`), where it is not on CPU itself.
    """

    def __init__(
        self,
        target: Any,
        inner: Any,
        sequences: Sequence[tuple[int, Sequence[int]]],
        ranks: tuple[int | None, ...] = FULL,
        rows: Tensor | None = None,
    ):
        self.target, self.inner = target, inner
        depth, vocab = inner.config.block_size - 1, target.config.vocab_size
        ends = max(len(tokens) for _, tokens in sequences)
        following = torch.full((ends, vocab, depth), -1)
        for start, tokens in sequences:
            for position in range(start, len(tokens)):
                known = torch.tensor(tokens[position + 1 : position + 1 + depth])
                following[position, tokens[position], : len(known)] = known
        device = target.device
        self._vocab, self._ends = vocab, ends
        self._following = following.view(-1, depth).to(device)
        self._ranks = torch.tensor([-1 if rank is None else rank for rank in ranks], device=device)
        ranked = _ranked_rows(target) if rows is None else rows
        self._rows = ranked.flatten(0, 1).to(device)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, embeddings: Tensor, state: Any, kv: Tensor) -> Tensor:
        hidden = self.inner(embeddings, state, kv)
        anchors = (embeddings[:, 0, None] == self.target.embedding).all(-1).int().argmax(1)
        spots = state.positions[:, 0].clamp(max=self._ends - 1) * self._vocab + anchors
        tokens = self._following.index_select(0, spots)
        spots = (state.positions[:, 1:] % len(self._ranks)).reshape(-1)
        ranks = self._ranks.index_select(0, spots).view_as(tokens)
        spots = ranks.clamp(min=0) * self._vocab + tokens.clamp(min=0)
        rows = self._rows.index_select(0, spots.view(-1)).view(*tokens.shape, -1)
        known = ((ranks >= 0) & (tokens >= 0))[:, :, None]
        return torch.cat((hidden[:, :1], torch.where(known, rows, hidden[:, 1:])), 1)
