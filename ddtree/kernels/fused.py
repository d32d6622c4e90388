"""The Triton kernel set: the ops of `TorchOps`, each as few launches as it can be."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddtree.kernels.attention import paged_attention
from ddtree.kernels.kv_cache import move_kv, write_kv
from ddtree.kernels.paged_plan import PagedPlan, check_plan
from ddtree.kernels.reference import TorchOps, View

USUAL_MULTIPROCESSORS = 132
"""What launches are cut for where the device cannot be asked."""


class TritonOps(TorchOps):
    """Shapes and meanings are `TorchOps`'s; an op without a kernel here is the torch one."""

    name = "triton"
    reads_whole_tables = False

    def __init__(self, device: torch.device):
        super().__init__(device)
        # Packed linears are recorded with the torch attention's masks, which this set never makes.
        self.linear_library = ""
        self.multiprocessors = USUAL_MULTIPROCESSORS
        if device.type == "cuda":
            self.multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count

    # -- attention over pages -----------------------------------------------------------------

    def plan_attention(
        self,
        block_table: Tensor,
        prefix_len: Tensor,
        num_tokens: int,
        page_size: int,
        views: tuple[View, ...],
        words: Tensor | None = None,
    ) -> Any:
        """As `TorchOps.plan_attention`, at no cost: a `PagedPlan` of what the kernels read.

        Raises:
            ValueError: an argument is not as described there.
        """
        plan = PagedPlan(block_table, prefix_len, words, num_tokens, page_size, views)
        check_plan(plan)
        return plan

    def attention(self, q: Tensor, kv_layer: Tensor, plan: Any, view: View, scale: float) -> Tensor:
        """Attend from `q [B, T, Hq, D]` to the paged keys of `kv_layer [slots, 2, Hkv, D]`."""
        kind, window = view
        return paged_attention(
            q,
            kv_layer,
            plan.block_table,
            plan.prefix_len,
            plan.words if kind == "tree" else None,
            plan.page_size,
            kind,
            window,
            scale,
            self.multiprocessors,
        )

    # -- KV pages -----------------------------------------------------------------------------

    def write_kv(self, kv_layer: Tensor, slots: Tensor, kv: Tensor) -> None:
        """Store `kv [B, T, 2, Hkv, D]` at `slots [B, T]` of `kv_layer [slots, 2, Hkv, D]`."""
        write_kv(kv_layer, slots, kv)

    def move_kv(self, kv: Tensor, source: Tensor, target: Tensor) -> None:
        """As `TorchOps.move_kv`, for all layers of `kv [layers, slots, 2, Hkv, D]` at once."""
        move_kv(kv, source, target)

    # -- dense ------------------------------------------------------------------------------

    # -- vocabulary ---------------------------------------------------------------------------
