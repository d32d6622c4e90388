"""What a step works on: the metadata of one forward, and the device rows of all requests."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ddtree.config.options import MAX_BIASES, MAX_STOP_IDS

SCALARS = (
    "length",
    "anchor",
    "done",
    "limit",
    "budget",
    "chain",
    "seed",
    "top_k",
    "min_end",
)
"""The first columns of `Rows.integers`; a round writes the first three."""
STATE_COLUMNS = 3
HEAD_COLUMNS = len(SCALARS) + MAX_STOP_IDS
"""Columns before the block table: the scalars and the stop ids."""
FLOATS = ("temperature", "top_p", "min_p", "repetition", "presence", "frequency")
"""The columns of `RowState.floats`."""


@dataclass
class StepState:
    """All that a model forward needs to know about the step."""

    positions: Tensor
    """[B, T] int64 absolute positions, for RoPE."""
    slots: Tensor
    """[B, T] int64 KV slots that the tokens' keys and values are written to."""
    plan: Any
    """The kernel set's attention plan, made once per forward."""


class _Column:
    """A named column `[R]` of `Rows.integers`: a view, to be read or written in place."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.index = SCALARS.index(name)

    def __get__(self, rows: Rows, owner: type) -> Tensor:
        return rows.scalars[self.index]


@dataclass
class Rows:
    """Per-request integers, in one array so that a round gathers and scatters all at once."""

    integers: Tensor
    """[R, HEAD_COLUMNS + pages] int64: scalars, stop ids padded with -1, then the block table:
    page numbers, of which unused ones are the dummy page."""

    length = _Column()
    """Tokens committed to the target KV."""
    anchor = _Column()
    """Newest emitted token, not in the target KV yet."""
    done = _Column()
    """1: the row is frozen."""
    limit = _Column()
    """Prompt plus output tokens at which the row ends."""
    budget = _Column()
    """Tree nodes below the root."""
    chain = _Column()
    """1: only the most likely token of each depth."""
    seed = _Column()
    top_k = _Column()
    min_end = _Column()
    """At positions before it no stop id is chosen."""

    @cached_property
    def scalars(self) -> tuple[Tensor, ...]:
        """All columns, made once: `integers` is never bound to another tensor."""
        return self.integers.narrow(1, 0, len(SCALARS)).unbind(1)

    @property
    def stop_ids(self) -> Tensor:
        """[R, MAX_STOP_IDS] view."""
        return self.integers.narrow(1, len(SCALARS), MAX_STOP_IDS)

    @property
    def block_table(self) -> Tensor:
        """[R, pages] view."""
        return self.integers[:, HEAD_COLUMNS:]


@dataclass
class RowState(Rows):
    """All device rows: one per slot, the last one for padding rows."""

    floats: Tensor
    """[R, len(FLOATS)] float32; see `kernels.sampling` for what they mean."""
    bias_ids: Tensor
    """[R, MAX_BIASES] int64 token ids whose logits are biased, padded with -1."""
    bias_values: Tensor
    """[R, MAX_BIASES] float32."""
    output_counts: Tensor
    """[R, V] int32 how often each token was emitted; kept for rows with penalties only."""
    prompt_seen: Tensor
    """[R, V] bool tokens of the prompt; kept for rows with penalties only."""

    @classmethod
    def allocate(
        cls, slots: int, table_width: int, vocab_size: int, device: torch.device
    ) -> RowState:
        """Make the arrays for `slots` requests plus the spare one that padding rows use."""
        rows = slots + 1

        def zeros(columns: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(rows, columns, dtype=dtype, device=device)

        state = cls(
            integers=zeros(HEAD_COLUMNS + table_width, torch.int64),
            floats=zeros(len(FLOATS), torch.float32),
            bias_ids=zeros(MAX_BIASES, torch.int64).fill_(-1),
            bias_values=zeros(MAX_BIASES, torch.float32),
            output_counts=zeros(vocab_size, torch.int32),
            prompt_seen=zeros(vocab_size, torch.bool),
        )
        state.done.fill_(1)
        state.stop_ids.fill_(-1)
        for name in ("top_p", "repetition"):
            state.floats[:, FLOATS.index(name)].fill_(1.0)
        return state

    def gather(self, slot_ids: Tensor, table_width: int) -> Rows:
        """Copy the integers of the rows `slot_ids [B]` out, with their first pages."""
        columns = self.integers.narrow(1, 0, HEAD_COLUMNS + table_width)
        return Rows(columns.index_select(0, slot_ids))
