"""The parts that all our models are made of: linears, norms, rotary embedding, decoder layer.

They are plain callables: the call machinery of `nn.Module` costs a small model on CPU time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ddtree.config import LayerConfig, RopeConfig
from ddtree.kernels.reference import TorchOps, View
from ddtree.models.loader import Checkpoint
from ddtree.parallel import SINGLE, Parallel, Part
from ddtree.state import StepState

ROPE_MARGIN = 1024
"""Positions that RoPE tables hold beyond the longest context: room for one draft."""


class Linear:
    """One matmul over one or several checkpoint weights, stacked by output rows and packed.

    Args:
        in_features: columns of the weights; where each rank has a part of them, the ranks' results
            are added up: one all-reduce.
        parts: checkpoint name (without ``.weight``) -> output rows of each weight, or this rank's
            part of them.
    """

    def __init__(
        self,
        ops: TorchOps,
        in_features: int | Part,
        parts: Mapping[str, int | Part],
        bias: bool = False,
        parallel: Parallel = SINGLE,
    ):
        self.ops = ops
        self.in_features = Part.of(in_features)
        self.parts = parts
        # A bias is added once, by the first of the ranks that share a sum.
        self.has_bias = bias and self.in_features.start == 0
        self._reduce = None if self.in_features.whole else parallel.all_sum
        self.weight: Any = None
        self.bias: Tensor | None = None

    def load(self, checkpoint: Checkpoint, prefix: str = "", exact: bool = False) -> None:
        """Read and pack the weights named `prefix + part`; the unpacked copy is freed.

        exact: even if the model drafts.
        """
        weights = {f"{prefix}{part}.weight": rows for part, rows in self.parts.items()}
        self.weight = checkpoint.pack(weights, self.in_features, exact)
        if self.has_bias:
            biases = {f"{prefix}{part}.bias": rows for part, rows in self.parts.items()}
            self.bias = checkpoint.stack(biases)

    def __call__(self, x: Tensor) -> Tensor:
        """`x [..., I]` -> `[..., O]`, O being the sum of the parts' rows."""
        y = self.ops.linear(x, self.weight)
        y = y if self.bias is None else y + self.bias
        return y if self._reduce is None else self._reduce(y)


class RMSNorm:
    """Root-mean-square norm over the last dimension, computed in float32."""

    def __init__(self, ops: TorchOps, size: int, eps: float):
        self.ops = ops
        self.size = size
        self.eps = eps
        self.weight: Any = None

    def load(self, checkpoint: Checkpoint, name: str) -> None:
        """Read the weight `[size]` named `name` (without ``.weight``)."""
        self.weight = checkpoint.read(f"{name}.weight", (self.size,))

    def __call__(self, x: Tensor) -> Tensor:
        """`x [..., size]` -> the same shape and dtype."""
        return self.ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream after an addition, `residual + x`, and its norm."""
        return self.ops.add_rms_norm(x, residual, self.weight, self.eps)


class Rope:
    """Cosine and signed sine tables `[P, D]`, made once and gathered once per forward."""

    def __init__(self, config: RopeConfig, head_dim: int, positions: int, device: torch.device):
        inv_freq, scale = rope_frequencies(config, head_dim)
        angles = torch.arange(positions, dtype=torch.float32)[:, None] * inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        self.cos = (angles.cos() * scale).to(device)
        # Negated where it meets the other half: x * cos + swapped(x) * sin is the rotation.
        sin = angles.sin() * scale
        sin[:, : head_dim // 2].neg_()
        self.sin = sin.to(device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """`positions [B, T]` -> cos and sin, each `[B, T, 1, D]` float32."""
        index = positions[:, :, None]
        embedding = nn.functional.embedding
        return embedding(index, self.cos), embedding(index, self.sin)


def rope_frequencies(config: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies `[head_dim / 2]` (float32) and the factor on cos and sin.

    Sources: RoFormer (default); Chen et al. 2023, position interpolation (linear); the Llama 3.1
    release (llama3); Peng et al. 2023, YaRN, sections 3.2 and 3.4 (yarn).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / config.theta**exponents
    if config.type == "default":
        return inv_freq, 1.0
    if config.type == "linear":
        return inv_freq / config.factor, 1.0
    if config.type == "llama3":
        return _llama3_frequencies(config, inv_freq), 1.0
    assert config.type == "yarn", config.type
    return _yarn_frequencies(config, inv_freq), _yarn_attention_factor(config)


def _llama3_frequencies(config: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Slow frequencies are divided by `factor`, fast ones kept, those between are blended."""
    turns = config.original_max_positions * inv_freq / (2 * math.pi)
    span = config.high_freq_factor - config.low_freq_factor
    keep = ((turns - config.low_freq_factor) / span).clamp(0.0, 1.0)
    return keep * inv_freq + (1.0 - keep) * inv_freq / config.factor


def _yarn_frequencies(config: RopeConfig, inv_freq: Tensor) -> Tensor:
    """Dimensions that turn often within the trained context are kept, the others stretched."""
    pairs = len(inv_freq)

    def dimension(turns: float) -> float:
        wavelength = config.original_max_positions / (turns * 2 * math.pi)
        return pairs * math.log(wavelength) / math.log(config.theta)

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    span = high - low if high != low else 0.001
    keep = 1.0 - ((torch.arange(pairs, dtype=torch.float32) - low) / span).clamp(0.0, 1.0)
    return keep * inv_freq + (1.0 - keep) * inv_freq / config.factor


def _yarn_attention_factor(config: RopeConfig) -> float:
    """The temperature of the attention logits, as a factor on cos and sin."""
    if config.attention_factor is not None:
        return config.attention_factor

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(config.factor) + 1.0 if config.factor > 1 else 1.0

    if config.mscale and config.mscale_all_dim:
        return magnitude(config.mscale) / magnitude(config.mscale_all_dim)
    return magnitude(1.0)


class Attention:
    """Grouped-query attention over the paged KV cache, of this rank's heads."""

    def __init__(self, config: LayerConfig, ops: TorchOps, parallel: Parallel = SINGLE):
        self.ops = ops
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        self.eps = config.rms_norm_eps
        width = parallel.part(config.num_heads * self.head_dim, self.head_dim)
        kv_width = parallel.kv_part(config.num_kv_heads, self.head_dim)
        self.heads, self.kv_heads = (part.size // self.head_dim for part in (width, kv_width))
        hidden, bias = config.hidden_size, config.attention_bias
        qkv = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        self.qkv = Linear(ops, hidden, qkv, bias)
        self.output = Linear(ops, width, {"o_proj": hidden}, bias, parallel)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm = RMSNorm(ops, self.head_dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(ops, self.head_dim, config.rms_norm_eps)

    def load(self, checkpoint: Checkpoint, prefix: str) -> None:
        """Read the weights under `prefix`."""
        self.qkv.load(checkpoint, prefix)
        self.output.load(checkpoint, prefix)
        if self.qk_norm:
            self.q_norm.load(checkpoint, f"{prefix}q_norm")
            self.k_norm.load(checkpoint, f"{prefix}k_norm")

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, state: StepState, kv_layer: Tensor, view: View
    ) -> Tensor:
        """`x [B, T, H]` -> `[B, T, H]`; the tokens' K/V are stored at `state.slots` first."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        q_weight, k_weight = None, None
        if self.qk_norm:
            q_weight, k_weight = self.q_norm.weight, self.k_norm.weight
        q = self.ops.rotate_and_write(
            heads, cos, sin, q_weight, k_weight, self.eps, state.slots, kv_layer
        )
        out = self.ops.attention(q, kv_layer, state.plan, view, self.scale)
        return self.output(out.flatten(2))


class MLP:
    """SwiGLU feed-forward, of this rank's part of the inner width."""

    def __init__(self, config: LayerConfig, ops: TorchOps, parallel: Parallel = SINGLE):
        self.ops = ops
        inner, hidden = parallel.part(config.intermediate_size), config.hidden_size
        gate_up = {"gate_proj": inner, "up_proj": inner}
        self.gate_up = Linear(ops, hidden, gate_up, config.mlp_bias)
        self.down = Linear(ops, inner, {"down_proj": hidden}, config.mlp_bias, parallel)

    def load(self, checkpoint: Checkpoint, prefix: str) -> None:
        """Read the weights under `prefix`."""
        self.gate_up.load(checkpoint, prefix)
        self.down.load(checkpoint, prefix)

    def __call__(self, x: Tensor) -> Tensor:
        """`x [B, T, H]` -> `[B, T, H]`."""
        return self.down(self.ops.silu_mul(self.gate_up(x)))


class DecoderLayer:
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: LayerConfig, ops: TorchOps, parallel: Parallel = SINGLE):
        self.attention_norm = RMSNorm(ops, config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, ops, parallel)
        self.mlp_norm = RMSNorm(ops, config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, ops, parallel)

    def load(self, checkpoint: Checkpoint, prefix: str) -> None:
        """Read the weights under `prefix`."""
        self.attention_norm.load(checkpoint, f"{prefix}input_layernorm")
        self.attention.load(checkpoint, f"{prefix}self_attn.")
        self.mlp_norm.load(checkpoint, f"{prefix}post_attention_layernorm")
        self.mlp.load(checkpoint, f"{prefix}mlp.")

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, state: StepState, kv_layer: Tensor, view: View
    ) -> Tensor:
        """Residual stream `x [B, T, H]` before the layer -> after it."""
        mixed = self.attention(self.attention_norm(x), cos, sin, state, kv_layer, view)
        x, normed = self.mlp_norm.add(mixed, x)
        return x + self.mlp(normed)
