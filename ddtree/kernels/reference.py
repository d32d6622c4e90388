"""Torch implementations of every op: the CPU kernel set, and the oracle of all others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree.kernels import wide_rows
from ddtree.kernels.draft_head import LEAST_WEIGHTS, DraftHead, make_draft_head
from ddtree.kernels.packed_linear import PackedLinear, Packer
from ddtree.kernels.shards import local_candidates, pack_choices

View = tuple[str, int]
"""How a layer looks at its own block: (``"causal" | "full" | "tree"``, sliding window or 0)."""

NULL_PAGE = 1
"""Page that is never written: unused key positions read its zeros."""
PACKED_ROWS_MAX = 64
"""Query tokens up to which the heads of a group are packed into one row tile."""
SPREAD_ROWS_MAX = 12
"""Query tokens up to which, on CPU, a tile per head is faster again: there are more of them for the
threads. A single token is too little for that."""


@dataclass
class AttentionPlan:
    """What all layers of one forward share: where the keys lie, and who may see them."""

    index: Tensor | None
    """[B * S] int64 slot of every key position; unused positions read the null page. None: the
    keys are all those of the pool that the layers are given."""
    masks: dict[View, Tensor | None]
    """[B, T, S] bool per view: True where the query may see the key; None: everywhere."""
    packed: dict[tuple[View, int], Tensor | None] = field(default_factory=dict)
    """[B, 1, T * G, S] float masks, made by the first layer that needs them."""
    window: tuple[int, int] | None = None
    """First slot and number of the keys, if they lie side by side."""

    def narrow(self, kv: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The part of the pool `kv [layers, slots, ...]` that has the keys, and `slots` in it."""
        if self.window is None:
            return kv, slots
        start, keys = self.window
        return kv.narrow(1, start, keys), slots - start

    def bias(self, view: View, group: int, dtype: torch.dtype) -> Tensor | None:
        """The view's mask `[B, 1, T * G, S]` as a bias, for rows that hold G = `group` heads."""
        mask = self.masks[view]
        if mask is None or (view, group) in self.packed:
            return self.packed.get((view, group))
        bias = torch.where(mask, torch.zeros((), dtype=dtype, device=mask.device), float("-inf"))
        bias = bias[:, None, :, None].expand(-1, -1, -1, group, -1).flatten(2, 3)
        self.packed[view, group] = bias
        return bias

    @property
    def views(self) -> tuple[View, ...]:
        """The views that the plan was made for."""
        return tuple(self.masks)


class TorchOps:
    """The ops in plain torch. Shapes: `B` rows, `T` tokens, `D` head size, `S` key positions."""

    name = "torch"
    reads_whole_tables = True
    """Attention looks at all key positions of the block tables it is given, used or not."""
    fused = False
    """The set also has what takes torch several ops, in one launch each: `build_tree`,
    `rank_candidates` and `choose_tokens`, which make their noise in place."""

    def __init__(self, device: torch.device):
        self.device = device
        self.packer = Packer(device)
        self.sees_values = device.type == "cpu"
        """The host can read values at no cost; nothing that a graph captures may depend on it."""
        self._scalars: dict[tuple[torch.device, float], tuple[Tensor, Tensor]] = {}

    def describe(self) -> dict[str, str]:
        """What serves which calls, for `Engine.describe`."""
        return {"attention": self.name}

    # -- dense ------------------------------------------------------------------------------

    def pack_linear(self, weight: Tensor, drafts: bool = False) -> Tensor | PackedLinear:
        """Prepack a weight `[O, I]` for `linear`; float32 on CPU only, elsewhere as it is."""
        return self.packer(weight, drafts)

    def linear(self, x: Tensor, weight: Tensor | PackedLinear) -> Tensor:
        """`x [..., I]` times the transposed weight -> `[..., O]`."""
        if isinstance(weight, PackedLinear):
            return weight.product(x)
        return F.linear(x, weight)

    def draft_head(self, read: Callable[[], Tensor], size: int) -> DraftHead | None:
        """A cheaper head for drafts, where one is worth it: on CPU, with the packed linears.

        read: gives the head's weight `[V, H]`, of `size` numbers in all.
        """
        if not self.packer.libraries or size < LEAST_WEIGHTS:
            return None
        weight = read()
        return make_draft_head(weight) if weight.dtype == torch.float32 else None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dimension, computed in float32, scaled in the input's dtype."""
        # x * sqrt(size) / sqrt(sum of squares + size * eps) in three ops; F.rms_norm takes eight.
        size = x.shape[-1]
        zero, floor = self._constants(x.device, math.sqrt(size * eps))
        wide = x if x.dtype == torch.float32 else x.float()
        norm = torch.hypot(torch.linalg.vector_norm(wide, dim=-1, keepdim=True), floor)
        normed = torch.addcdiv(zero, wide, norm, value=math.sqrt(size))
        return normed.mul_(weight) if wide is x else normed.to(x.dtype).mul_(weight)

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """The residual stream after an addition, `s = residual + x`, and `rms_norm(s)`."""
        total = residual + x
        return total, self.rms_norm(total, weight, eps)

    def _constants(self, device: torch.device, floor: float) -> tuple[Tensor, Tensor]:
        """Zero and `floor` as scalars on the device, made once."""
        found = self._scalars.get((device, floor))
        if found is None:
            zero = torch.zeros((), device=device)
            found = self._scalars[device, floor] = (zero, torch.full_like(zero, floor))
        return found

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """SwiGLU's gate: `[..., 2I]` (gate, then up) -> `[..., I]`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor, out: Tensor | None = None) -> Tensor:
        """Rotate the halves of every head of `x [B, T, h, D]`, into `out` where given.

        Args:
            cos, sin: [B, T, 1, D] float32; the first half of `sin` is negated.
            out: [B, T, h, D], may be `x` itself.
        """
        turned, other = x * cos, x.roll(x.shape[-1] // 2, -1)
        if x.dtype == torch.float32:
            return torch.addcmul(turned, other, sin, out=out)
        turned = torch.addcmul(turned, other, sin).to(x.dtype)
        return turned if out is None else out.copy_(turned)

    # -- attention over pages -----------------------------------------------------------------

    def plan_attention(
        self,
        block_table: Tensor,
        prefix_len: Tensor,
        num_tokens: int,
        page_size: int,
        views: tuple[View, ...],
        words: Tensor | None = None,
    ) -> AttentionPlan:
        """Prepare one forward of `num_tokens` = T tokens per row, for all its layers.

        Args:
            block_table: [B, P] integer pages; S = P * page_size key positions are looked at.
            prefix_len: [B] int64 number of committed keys; token t's own key is at prefix + t.
            views: the distinct views that the layers use.
            words: [B, T, W] int64 ancestor-or-self bits, for the "tree" views.
        """
        window = None
        if self.sees_values:
            longest = int(prefix_len.max()) + num_tokens
            block_table = block_table[:, : -(-longest // page_size)]
            window = _window(block_table, longest, page_size)
        batch, pages = block_table.shape
        keys = pages * page_size if window is None else window[1]
        device = block_table.device
        position = torch.arange(keys, device=device)
        own = position - prefix_len[:, None]
        query = torch.arange(num_tokens, device=device)[:, None]
        masks: dict[View, Tensor | None] = {}
        for kind, span in views:
            if window is not None and not span and (kind == "full" or num_tokens == 1):
                masks[kind, span] = None
                continue
            if kind == "causal":
                mask = own[:, None] <= query
            elif kind == "full":
                mask = (own < num_tokens)[:, None].expand(batch, num_tokens, keys)
            else:
                assert kind == "tree" and words is not None and not span
                mask = _tree_mask(own, words)
            if span:
                mask = mask & (own[:, None] > query - span)
            masks[kind, span] = mask
        if window is not None:
            return AttentionPlan(None, masks, window=window)
        in_page = torch.arange(page_size, device=device)
        slot = (block_table.long()[:, :, None] * page_size + in_page).view(batch, keys)
        slot = torch.where(own < num_tokens, slot, NULL_PAGE * page_size)
        return AttentionPlan(slot.view(-1), masks)

    def attention(
        self, q: Tensor, kv_layer: Tensor, plan: AttentionPlan, view: View, scale: float
    ) -> Tensor:
        """Attend from `q [B, T, Hq, D]` to the paged keys of `kv_layer [slots, 2, Hkv, D]`."""
        # Plain integers also while a layer is being recorded.
        batch, tokens, heads, dim = (int(size) for size in q.shape)
        kv_heads = int(kv_layer.shape[2])
        group = heads // kv_heads
        pairs = kv_layer if plan.index is None else kv_layer.index_select(0, plan.index)
        k, v = pairs.view(batch, -1, 2 * kv_heads, dim).transpose(1, 2).split(kv_heads, 1)
        tile = self.tile_heads(tokens, group)
        bias = plan.bias(view, tile, q.dtype)
        if tile == 1:
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), k, v, bias, scale=scale, enable_gqa=group > 1
            )
            return out.transpose(1, 2)
        rows = q.view(batch, tokens, kv_heads, group, dim).transpose(1, 2)
        rows = rows.reshape(batch, kv_heads, tokens * group, dim)
        out = F.scaled_dot_product_attention(rows, k, v, bias, scale=scale)
        out = out.view(batch, kv_heads, tokens, group, dim).transpose(1, 2)
        return out.reshape(batch, tokens, heads, dim)

    def tile_heads(self, tokens: int, group: int) -> int:
        """How many of the G = `group` heads of a key head attend as rows of one tile: all, or 1."""
        spread = self.device.type == "cpu" and 1 < tokens <= SPREAD_ROWS_MAX
        return 1 if spread or tokens > PACKED_ROWS_MAX else group

    # -- KV pages -----------------------------------------------------------------------------

    def write_kv(self, kv_layer: Tensor, slots: Tensor, kv: Tensor) -> None:
        """Store `kv [B, T, 2, Hkv, D]` at `slots [B, T]` of `kv_layer [slots, 2, Hkv, D]`."""
        kv_layer.index_copy_(0, slots.reshape(-1), kv.flatten(0, 1))

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
        """Norm and rotate new queries and keys, and store the keys and values.

        Args:
            heads: [B, T, Hq + 2 * Hkv, D] queries, keys and values; may be overwritten.
            cos, sin: as in `rope`.
            q_weight, k_weight: [D] the norms' weights; None, both: no norm.
            slots: [B, T] of `kv_layer [slots, 2, Hkv, D]`.

        Returns:
            The queries [B, T, Hq, D].
        """
        kv_heads = int(kv_layer.shape[2])
        count = int(heads.shape[2])
        q, kv = heads.split((count - 2 * kv_heads, 2 * kv_heads), dim=2)
        if q_weight is not None and k_weight is not None:
            q = self.rope(self.rms_norm(q, q_weight, eps), cos, sin)
            k = kv[:, :, :kv_heads]
            self.rope(self.rms_norm(k, k_weight, eps), cos, sin, out=k)
        else:
            turning = heads[:, :, : count - kv_heads]
            self.rope(turning, cos, sin, out=turning)
        self.write_kv(kv_layer, slots, kv.unflatten(2, (2, kv_heads)))
        return q

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
        """Norm and rotate the keys of context rows, and store them and the values, in all layers.

        Args:
            rows: [layers, B, T, 2, Hkv, D] keys and values, a view of contiguous
                [B, T, layers, 2, Hkv, D]; may be overwritten.
            cos, sin: as in `rope`.
            k_weights: [layers, D] the norms' weights.
            slots: [B, T] of `kv [layers, slots, 2, Hkv, D]`.
        """
        for index, weight in enumerate(k_weights.unbind(0)):
            k = rows[index, :, :, 0]
            self.rope(self.rms_norm(k, weight, eps), cos, sin, out=k)
            self.write_kv(kv[index], slots, rows[index])

    def move_kv(self, kv: Tensor, source: Tensor, target: Tensor) -> None:
        """Copy rows `source [n]` to `target [n]` in `kv [layers, slots, 2, Hkv, D]`.

        All rows are loaded before any is stored, so source and target may overlap.
        """
        kv.index_copy_(1, target, kv.index_select(1, source))

    # -- vocabulary ---------------------------------------------------------------------------

    def top_candidates(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` most likely tokens per row of `logits [..., V]`.

        Returns ids `[..., K]` int64 and log-probabilities `[..., K]` float32, descending.
        """
        values, ids = wide_rows.topk(logits.float(), count)
        return ids, values - logits.float().logsumexp(-1, keepdim=True)

    def argmax(self, logits: Tensor) -> Tensor:
        """Most likely token per row of `logits [..., V]` -> `[...]` int64, lowest id on a tie."""
        return wide_rows.argmax(logits)

    def local_choice(self, logits: Tensor, first_id: int) -> Tensor:
        """As `argmax`, of a shard from token `first_id` on, packed: see `kernels.shards`."""
        ids = self.argmax(logits)
        return pack_choices(logits.gather(-1, ids[..., None])[..., 0], ids + first_id)

    def local_candidates(
        self, logits: Tensor, temperature: Tensor | None, count: int, first_id: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`kernels.shards.local_candidates` without noise."""
        return local_candidates(logits, temperature, count, first_id)


def _window(block_table: Tensor, keys: int, page_size: int) -> tuple[int, int] | None:
    """First slot and number of a single row's keys, if its pages lie side by side."""
    if block_table.shape[0] > 1:
        return None
    pages = block_table[0].tolist()
    if pages != list(range(pages[0], pages[0] + len(pages))):
        return None
    return pages[0] * page_size, keys


def _tree_mask(own: Tensor, words: Tensor) -> Tensor:
    """Dense `[B, T, S]` mask: the prefix, and the ancestors-or-self named by the bit words."""
    batch, tokens, _ = words.shape
    node = torch.arange(tokens, device=words.device)
    bits = (words[:, :, node >> 6] >> (node & 63)) & 1
    inside = own.clamp(0, tokens - 1)[:, None].expand(batch, tokens, own.shape[1])
    tree = bits.gather(2, inside).bool() & (own < tokens)[:, None]
    return tree | (own < 0)[:, None]
