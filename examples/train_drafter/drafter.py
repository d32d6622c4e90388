"""The DFlash drafter as a trainable module: many anchor blocks of a sequence in one forward."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddtree.config import DraftConfig
from ddtree.models.layers import rope_frequencies


class Rope(nn.Module):
    """Cosine and sine tables `[P, D]` of the absolute positions."""

    def __init__(self, config: DraftConfig, positions: int, device: torch.device) -> None:
        super().__init__()
        inverse, scale = rope_frequencies(config.rope, config.head_dim)
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * inverse
        self.cos = (angles.cos().repeat(1, 2) * scale).to(device)
        self.sin = (angles.sin().repeat(1, 2) * scale).to(device)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`positions` `[B, T]` -> cosine and sine, `[B, T, D]` each."""
        return self.cos[positions], self.sin[positions]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Half-rotation RoPE: `x` `[B, T, h, D]`, `cos` and `sin` `[B, T, D]`."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)


class Attention(nn.Module):
    """Queries of the blocks against the sequence's context rows and the own block."""

    def __init__(self, config: DraftConfig, view: tuple[str, int]) -> None:
        super().__init__()
        hidden, heads, kv, size = (
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        bias = config.attention_bias
        self.heads, self.kv_heads, self.size, self.view = heads, kv, size, view
        self.q_proj = nn.Linear(hidden, heads * size, bias=bias)
        self.k_proj = nn.Linear(hidden, kv * size, bias=bias)
        self.v_proj = nn.Linear(hidden, kv * size, bias=bias)
        self.o_proj = nn.Linear(heads * size, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """`x` `[B, T, H]` -> keys and values `[B, Hkv, T, D]`."""
        shape = (*x.shape[:2], self.kv_heads, self.size)
        k = rotate(self.k_norm(self.k_proj(x).view(shape)), cos, sin)
        return k.transpose(1, 2), self.v_proj(x).view(shape).transpose(1, 2)

    def forward(self, x: Tensor, context: Tensor, ropes: Ropes, masks: Masks) -> Tensor:
        """`x` `[B, A*P, H]` (A blocks of P rows), `context` `[B, S, H]` -> `[B, A*P, H]`."""
        batch, rows, _ = x.shape
        blocks, size, length = masks.blocks, masks.rows, context.shape[1]
        group = self.heads // self.kv_heads
        kc, vc = self.keys_values(context, *ropes.context)
        kb, vb = self.keys_values(x, *ropes.block)
        kb = kb.reshape(batch, self.kv_heads, blocks, size, self.size)
        vb = vb.reshape(batch, self.kv_heads, blocks, size, self.size)
        q = self.q_norm(self.q_proj(x).view(batch, rows, self.heads, self.size))
        q = rotate(q, *ropes.block) * self.size**-0.5
        q = q.view(batch, blocks, size, self.kv_heads, group, self.size)
        q = q.permute(0, 3, 1, 4, 2, 5).reshape(
            batch, self.kv_heads, blocks, group * size, self.size
        )
        far = q.flatten(2, 3) @ kc.transpose(-1, -2)
        far = far.view(batch, self.kv_heads, blocks, group, size, length)
        near = (q @ kb.transpose(-1, -2)).view(batch, self.kv_heads, blocks, group, size, size)
        context_mask, block_mask = masks(self.view)
        scores = torch.cat((far + context_mask, near + block_mask), dim=-1).softmax(dim=-1)
        far, near = scores.flatten(3, 4).split((length, size), dim=-1)
        out = (far.flatten(2, 3) @ vc).view(q.shape) + near @ vb
        out = out.view(batch, self.kv_heads, blocks, group, size, self.size)
        out = out.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows, self.heads * self.size)
        return self.o_proj(out)


class Ropes:
    """RoPE tables gathered for the context rows and for the block rows of one batch."""

    def __init__(self, rope: Rope, length: int, positions: Tensor) -> None:
        self.context = rope(torch.arange(length, device=positions.device).unsqueeze(0))
        self.block = rope(positions.flatten(1))


class Masks:
    """Additive masks of one batch, by view: `[B, 1, A, 1, P, S]` for the context, `[P, P]`."""

    def __init__(self, positions: Tensor, length: int, reach: int = 0) -> None:
        self.blocks, self.rows = positions.shape[1:]
        self._positions, self._length, self._reach = positions, length, reach
        self._made: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, view: tuple[str, int]) -> tuple[Tensor, Tensor]:
        if view not in self._made:
            self._made[view] = self._make(view)
        return self._made[view]

    def _make(self, view: tuple[str, int]) -> tuple[Tensor, Tensor]:
        kind, window = view
        positions = self._positions
        key = torch.arange(self._length, device=positions.device)
        anchor = positions[:, :, :1, None]
        seen = key < anchor
        if window:
            seen = seen & (key > positions.unsqueeze(-1) - window)
        if self._reach:
            seen = seen & (key >= anchor - self._reach)
        seen = seen.expand(*positions.shape, self._length) if window else seen
        row = torch.arange(self.rows, device=positions.device)
        own = torch.ones(self.rows, self.rows, dtype=torch.bool, device=positions.device)
        if kind == "causal":
            own = row[None, :] <= row[:, None]
        if window:
            own = own & (row[None, :] > row[:, None] - window)
        return _additive(seen)[:, None, :, None], _additive(own)


def _additive(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, -1e30)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One drafter layer."""

    def __init__(self, config: DraftConfig, view: tuple[str, int], dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, view)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, context: Tensor, ropes: Ropes, masks: Masks) -> Tensor:
        x = x + self._drop(self.self_attn(self.input_layernorm(x), context, ropes, masks))
        return x + self._drop(self.mlp(self.post_attention_layernorm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class TrainableDrafter(nn.Module):
    """A DFlash drafter whose parameter names are the published tensor names.

    Same function as the engine's drafter, but without a KV cache: the context rows are recomputed
    from the features, and all blocks of a sequence go through together.
    """

    def __init__(
        self,
        config: DraftConfig,
        max_positions: int | None = None,
        device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.config, self.dropout = config, dropout
        taps = len(config.target_layer_ids)
        self.fc = nn.Linear(taps * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config, view, dropout) for view in config.layer_views)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        max_positions = max_positions or config.max_position_embeddings + config.block_size
        self.rope = Rope(config, max_positions, device)
        self.to(device)

    def forward(
        self, embeddings: Tensor, features: Tensor, positions: Tensor, reach: int = 0
    ) -> Tensor:
        """Hidden states of every block row, after the final norm.

        Args:
            embeddings: `[B, A, P, H]` target embeddings of the blocks `[anchor, mask x L]`.
            features: `[B, S, M*H]` taps of the sequence; a block sees the rows before its anchor.
            positions: `[B, A, P]` absolute positions of the block rows.
            reach: how many context rows before the anchor a block may see; 0 = all.

        Returns:
            `[B, A, P, H]`.
        """
        batch, blocks, rows, hidden = embeddings.shape
        length = features.shape[1]
        ropes = Ropes(self.rope, length, positions)
        masks = Masks(positions, length, reach)
        context = self.hidden_norm(self.fc(features))
        context = F.dropout(context, self.dropout, self.training)
        x = (embeddings * self.config.input_embedding_scale).reshape(batch, blocks * rows, hidden)
        for layer in self.layers:
            x = layer(x, context, ropes, masks)
        return self.norm(x).view(batch, blocks, rows, hidden)
