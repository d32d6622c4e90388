"""The Triton kernel set: the ops of `TorchOps`, each as few launches as it can be."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ddtree.kernels import flash
from ddtree.kernels.attention import paged_attention
from ddtree.kernels.candidates import MAX_COUNT, local_candidates, rank_candidates
from ddtree.kernels.elementwise import add_rms_norm, rms_norm, rope, silu_mul
from ddtree.kernels.kv_cache import move_kv, rotate_and_write, write_kv
from ddtree.kernels.node_choice import choose_tokens
from ddtree.kernels.paged_plan import PagedPlan, check_plan, chip_of
from ddtree.kernels.reference import TorchOps, View
from ddtree.kernels.sampling import Filters
from ddtree.kernels.tree_build import TreeTensors, build_tree

logger = logging.getLogger("ddtree")


class TritonOps(TorchOps):
    """Shapes and meanings are `TorchOps`'s; an op without a kernel here is the torch one.

    Numbers per row `[B]` may be columns of the device rows, whatever their stride.
    """

    name = "triton"
    reads_whole_tables = False
    fused = True

    def __init__(self, device: torch.device):
        super().__init__(device)
        # Packed linears are recorded with the torch attention's masks, which this set never makes.
        self.packer.libraries = ()
        self.multiprocessors = chip_of(device).multiprocessors
        self._flash, self._flash_state = flash.load(device)
        self._refusals: dict[tuple[int, torch.dtype, int], str] = {}

    def describe(self) -> dict[str, str]:
        """What serves which calls, and why: `attention`, and `causal attention` once it ran."""
        causal = ", ".join(dict.fromkeys(map(self._choice, self._refusals.values())))
        return {"attention": "triton", "causal attention": causal or "not called yet"}

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
        """Attend from `q [B, T, Hq, D]` to the paged keys of `kv_layer [slots, 2, Hkv, D]`.

        Causal views (prefill chunks, chains, plain decoding) go to flash-attn where it can be had
        and reads such pages.
        """
        kind, window = view
        if kind == "causal" and self._takes_flash(plan.page_size, q.dtype, q.shape[3]):
            return flash.attend(self._flash, q, kv_layer, plan, window, scale)
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

    def _takes_flash(self, page_size: int, dtype: torch.dtype, head_dim: int) -> bool:
        """Whether causal calls of this kind go to flash-attn; said once to the log."""
        call = (page_size, dtype, head_dim)
        if call not in self._refusals:
            refusal = self._flash_state if self._flash is None else flash.refusal(*call)
            self._refusals[call] = refusal
            logger.info("causal attention: %s", self._choice(refusal))
        return not self._refusals[call]

    def _choice(self, refusal: str) -> str:
        return f"triton ({refusal})" if refusal else self._flash_state

    # -- KV pages -----------------------------------------------------------------------------

    def write_kv(self, kv_layer: Tensor, slots: Tensor, kv: Tensor) -> None:
        """Store `kv [B, T, 2, Hkv, D]` at `slots [B, T]` of `kv_layer [slots, 2, Hkv, D]`."""
        write_kv(kv_layer, slots, kv)

    def move_kv(self, kv: Tensor, source: Tensor, target: Tensor) -> None:
        """As `TorchOps.move_kv`, for all layers of `kv [layers, slots, 2, Hkv, D]` at once."""
        move_kv(kv, source, target)

    def rotate_and_write(
        self,
        heads: Tensor,
        cos: Tensor,
        sin: Tensor,
        q_weight: Tensor | None,
        k_weight: Tensor | None,
        eps: float,
        slots: Tensor,
        kv_layer: Tensor,
    ) -> Tensor:
        """As `TorchOps.rotate_and_write`, in place of two `rms_norm`s, two `rope`s and a store."""
        one, layer = heads.unsqueeze(2), kv_layer.unsqueeze(0)
        return rotate_and_write(one, cos, sin, q_weight, k_weight, eps, slots, layer)

    def write_context(
        self,
        rows: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_weights: Tensor,
        eps: float,
        slots: Tensor,
        kv: Tensor,
    ) -> None:
        """As `TorchOps.write_context`, in one launch for all layers."""
        heads = rows.permute(1, 2, 0, 3, 4, 5).flatten(3, 4)
        rotate_and_write(heads, cos, sin, None, k_weights, eps, slots, kv)

    # -- dense ------------------------------------------------------------------------------

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dimension, in float32 with one rounding at the end."""
        return rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """`s = x + residual` and `rms_norm(s)`, in one launch."""
        return add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """SwiGLU's gate: `[..., 2I]` (gate, then up) -> `[..., I]`."""
        return silu_mul(gate_up)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
        """As `TorchOps.rope`."""
        return rope(x, cos, sin, out)

    # -- tree -----------------------------------------------------------------------------------

    def build_tree(
        self,
        anchor: Tensor,
        ids: Tensor,
        weights: Tensor,
        num_nodes: int,
        budget: Tensor | None = None,
    ) -> TreeTensors:
        """`ddtree.tree.build_tree` in one launch; the fields of its `Tree`, in order."""
        budget = None if budget is None else budget.contiguous()
        return build_tree(anchor.contiguous(), ids, weights, num_nodes, budget)

    # -- vocabulary ---------------------------------------------------------------------------

    def top_candidates(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """As `TorchOps.top_candidates`; equal logits are ranked by id."""
        if count > MAX_COUNT:
            return super().top_candidates(logits, count)
        ids, values = rank_candidates(logits.reshape(1, -1, logits.shape[-1]), None, count)
        shape = (*logits.shape[:-1], count)
        return ids.view(shape), values.view(shape)

    def rank_candidates(
        self,
        logits: Tensor,
        temperature: Tensor,
        count: int,
        seeds: Tensor | None = None,
        positions: Tensor | None = None,
        alpha: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The drafter's candidates under its rows' temperature and noise, [B, L, K] each."""
        seeds = None if seeds is None else seeds.contiguous()
        heat = temperature.contiguous()
        return rank_candidates(logits, heat, count, seeds, positions, alpha, scale)

    def argmax(self, logits: Tensor) -> Tensor:
        """As `TorchOps.argmax`."""
        chosen, _ = choose_tokens(logits.reshape(1, -1, logits.shape[-1]))
        return chosen.view(logits.shape[:-1])

    def choose_tokens(
        self,
        logits: Tensor,
        filters: Filters | None = None,
        seeds: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Tokens of `logits [B, N, V]` after filters and noise, [B, N] int64."""
        return choose_tokens(logits, *_packed(filters, seeds), positions)[0]

    # -- vocabulary in shards -----------------------------------------------------------------

    def local_choice(
        self,
        logits: Tensor,
        first_id: int,
        filters: Filters | None = None,
        seeds: Tensor | None = None,
        positions: Tensor | None = None,
        thresholds: Tensor | None = None,
    ) -> Tensor:
        """As `choose_tokens`, of a shard from token `first_id` on, packed: see `kernels.shards`.

        thresholds: [B, N] float32, of the whole vocabulary; needed with filters.
        """
        rows = logits if logits.dim() == 3 else logits.reshape(1, -1, logits.shape[-1])
        parameters = _packed(filters, seeds)
        chosen = choose_tokens(rows, *parameters, positions, first_id, thresholds)[1]
        return chosen.view(logits.shape[:-1])

    def local_candidates(
        self,
        logits: Tensor,
        temperature: Tensor | None,
        count: int,
        first_id: int,
        seeds: Tensor | None = None,
        positions: Tensor | None = None,
        alpha: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`kernels.shards.local_candidates`, with the noise of `seeds` at `positions`."""
        if min(count, logits.shape[-1]) > MAX_COUNT:
            return super().local_candidates(logits, temperature, count, first_id)
        seeds = None if seeds is None else seeds.contiguous()
        heat = None if temperature is None else temperature.contiguous()
        return local_candidates(logits, heat, count, first_id, seeds, positions, alpha)


def _packed(filters: Filters | None, seeds: Tensor | None) -> tuple[Filters | None, Tensor | None]:
    """Columns of the device rows, packed for kernels that take them so."""
    if filters is not None:
        given = {name: value for name, value in vars(filters).items() if value is not None}
        filters = replace(filters, **{name: x.contiguous() for name, x in given.items()})
    return filters, None if seeds is None else seeds.contiguous()
