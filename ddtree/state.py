"""What a step works on: the metadata of one forward, and the device rows of all requests."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ddtree.config.options import MAX_STOP_IDS


@dataclass
class StepState:
    """All that a model forward needs to know about the step."""

    positions: Tensor
    """[B, T] int64 absolute positions, for RoPE."""
    slots: Tensor
    """[B, T] int64 KV slots that the tokens' keys and values are written to."""
    plan: Any
    """The kernel set's attention plan, made once per forward."""


@dataclass
class RowState:
    """Per-request state on the device: one entry per slot, the last slot for padding rows."""

    length: Tensor
    """[R] int64 tokens committed to the target KV."""
    anchor: Tensor
    """[R] int64 newest emitted token, not in the target KV yet."""
    done: Tensor
    """[R] bool: the row is frozen."""
    limit: Tensor
    """[R] int64 prompt plus output tokens at which the row ends."""
    budget: Tensor
    """[R] int64 tree nodes below the root."""
    chain: Tensor
    """[R] bool: only the most likely token of each depth."""
    stop_ids: Tensor
    """[R, MAX_STOP_IDS] int64, padded with -1."""
    block_table: Tensor
    """[R, pages] int64 page numbers; unused entries point to the dummy page."""

    @classmethod
    def allocate(cls, slots: int, table_width: int, device: torch.device) -> RowState:
        """Make the arrays for `slots` requests plus the spare one that padding rows use."""
        rows = slots + 1

        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            length=zeros(rows),
            anchor=zeros(rows),
            done=torch.ones(rows, dtype=torch.bool, device=device),
            limit=zeros(rows),
            budget=zeros(rows),
            chain=zeros(rows, dtype=torch.bool),
            stop_ids=torch.full((rows, MAX_STOP_IDS), -1, dtype=torch.int64, device=device),
            block_table=zeros(rows, table_width),
        )

    def gather(self, slot_ids: Tensor, table_width: int) -> RowState:
        """Copy the rows `slot_ids [B]` out, with the first `table_width` pages of each."""
        picked = {f.name: getattr(self, f.name).index_select(0, slot_ids) for f in fields(self)}
        picked["block_table"] = picked["block_table"][:, :table_width]
        return RowState(**picked)
