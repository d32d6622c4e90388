"""DFlash block drafter: a few layers that read the target's features and draft a whole block."""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from ddtree.config import DraftConfig
from ddtree.kernels.reference import TorchOps, View
from ddtree.models.layers import ROPE_MARGIN, DecoderLayer, Linear, RMSNorm, Rope
from ddtree.models.loader import Checkpoint
from ddtree.models.traced import TracedLayers
from ddtree.parallel import SINGLE, Parallel
from ddtree.state import StepState


class DFlash(nn.Module):
    """Drafts `[anchor, mask x L]` in one forward (Chen et al. 2026, DFlash).

    The context enters as keys and values only: those of every committed row are made from the
    target's tapped features by `write_context`, with the projections that also serve the block.
    Embedding and head are the target's.

    Args:
        num_positions: positions that the RoPE tables cover; by default the drafter's own maximum
            plus a margin. It must cover the target's context.
        parallel: the ranks that the model is divided among.

    Raises:
        ValueError: so many ranks cannot divide it.
    """

    def __init__(
        self,
        config: DraftConfig,
        ops: TorchOps,
        device: torch.device,
        dtype: torch.dtype,
        num_positions: int | None = None,
        parallel: Parallel = SINGLE,
    ):
        super().__init__()
        self.config, self.ops, self.device, self.dtype = config, ops, device, dtype
        inner = {"intermediate_size": config.intermediate_size}
        parallel.check_shapes("draft", config.num_heads, config.num_kv_heads, **inner)
        hidden = config.hidden_size
        width = parallel.kv_part(config.num_kv_heads, config.head_dim)
        # Every rank has all features and takes its columns of them: nothing is gathered.
        self._columns = parallel.part(len(config.target_layer_ids) * hidden)
        self.fc = Linear(ops, self._columns, {"fc": hidden}, parallel=parallel)
        self.hidden_norm = RMSNorm(ops, hidden, config.rms_norm_eps)
        self.layers = [DecoderLayer(config, ops, parallel) for _ in range(config.num_layers)]
        self.kv_shape = (config.num_layers, self.layers[0].attention.kv_heads, config.head_dim)
        self.traced = TracedLayers(self.layers, config, ops, parallel)
        self.norm = RMSNorm(ops, hidden, config.rms_norm_eps)
        # The k and v weights of all layers once more, stacked: context rows need no queries, and
        # one matmul instead of two per layer is worth the copy.
        self.context_kv = Linear(
            ops,
            hidden,
            {
                f"layers.{index}.self_attn.{part}": width
                for index in range(config.num_layers)
                for part in ("k_proj", "v_proj")
            },
            config.attention_bias,
        )
        self.context_norms: Any = None
        num_positions = num_positions or config.max_position_embeddings + ROPE_MARGIN
        self.rope = Rope(config.rope, config.head_dim, num_positions, device)

    def load(self, checkpoint: Checkpoint) -> None:
        """Fill every weight from `checkpoint`.

        Raises:
            ValueError: a tensor is missing or has another shape.
        """
        # Residual streams differ by orders of magnitude from row to row: no scale fits all.
        self.fc.load(checkpoint, exact=True)
        self.hidden_norm.load(checkpoint, "hidden_norm")
        for index, layer in enumerate(self.layers):
            layer.load(checkpoint, f"layers.{index}.")
            checkpoint.ignore(f"layers.{index}.self_attn.rotary_emb.inv_freq")
        self.context_kv.load(checkpoint)
        self.context_norms = torch.stack([layer.attention.k_norm.weight for layer in self.layers])
        self.norm.load(checkpoint, "norm")
        if self.config.draft_vocab_size is not None:
            checkpoint.ignore("d2t")
            checkpoint.ignore("t2d")

    @property
    def views(self) -> tuple[View, ...]:
        """The distinct attention views of the layers."""
        return tuple(dict.fromkeys(self.config.layer_views))

    def forward(self, embeddings: Tensor, state: StepState, kv: Tensor) -> Tensor:
        """Hidden states of one block per row, after the final norm.

        Args:
            embeddings: [B, L+1, H] the target's embeddings of the anchor and L mask tokens.
            state: positions, slots and the plan (made for `self.views`) of the block.
            kv: [layers, slots, 2, Hkv, D] paged K/V of the context; the block's own are written
                at state.slots.

        Returns:
            [B, L+1, H]; row i, given to the target's head, predicts the token at position i.
        """
        x = embeddings.to(self.dtype)
        if self.config.input_embedding_scale != 1.0:
            x = x * self.config.input_embedding_scale
        cos, sin = self.rope(state.positions)
        x, _ = self.traced.run(x, cos, sin, state, kv, self.config.layer_views)
        return self.norm(x)

    def write_context(self, features: Tensor, positions: Tensor, slots: Tensor, kv: Tensor) -> None:
        """Write the context K/V of committed rows in every layer.

        Args:
            features: [B, T, M*H] the target's tapped residual streams of the rows.
            positions: [B, T] int64 absolute positions.
            slots: [B, T] int64 slots to write.
            kv: [layers, slots, 2, Hkv, D].
        """
        mine = features if self._columns.whole else features[..., self._columns.slice]
        hidden = self.hidden_norm(self.fc(mine.to(self.dtype)))
        rows = rearrange(
            self.context_kv(hidden),
            "b t (layer two h d) -> layer b t two h d",
            layer=self.config.num_layers,
            two=2,
            d=self.config.head_dim,
        )
        cos, sin = self.rope(positions)
        eps = self.config.rms_norm_eps
        self.ops.write_context(rows, cos, sin, self.context_norms, eps, slots, kv)


def read_draft_tokens(
    checkpoint: Checkpoint, config: DraftConfig, vocab_size: int
) -> Tensor | None:
    """The tokens that a drafter of a part of the vocabulary drafts, ascending; None for all.

    As in EAGLE-3's checkpoints, draft token i is the target's token `i + d2t[i]`.

    Returns:
        [draft_vocab_size] int64 on CPU.

    Raises:
        ValueError: `d2t` or its size is missing, or it is no table of as many different tokens.
    """
    if config.draft_vocab_size is None and "d2t" in checkpoint:
        raise ValueError(
            f"draft: {checkpoint.folder} has a tensor d2t, but its config.json does not say "
            "draft_vocab_size"
        )
    whole = config.draft_vocab_size in (None, vocab_size)
    if config.draft_vocab_size is None or (whole and "d2t" not in checkpoint):
        return None
    offsets = checkpoint.integers("d2t", config.draft_vocab_size)
    tokens = (offsets + torch.arange(len(offsets))).sort().values
    inside = int(tokens[0]) >= 0 and int(tokens[-1]) < vocab_size
    if not inside or bool((tokens[1:] == tokens[:-1]).any()):
        raise ValueError(
            f"draft: d2t in {checkpoint.folder} must lead to {len(tokens)} different tokens of the "
            f"target's vocabulary, 0..{vocab_size - 1}"
        )
    return None if whole else tokens
