"""Llama target: a plain pre-norm decoder over the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddtree.config import ModelConfig
from ddtree.kernels.reference import TorchOps, View
from ddtree.models.layers import ROPE_MARGIN, DecoderLayer, Linear, RMSNorm, Rope
from ddtree.models.loader import Checkpoint
from ddtree.models.traced import TracedLayers
from ddtree.parallel import SINGLE, Parallel
from ddtree.state import StepState


class Llama(nn.Module):
    """A causal LM whose forward writes K/V to pages and can tap its residual stream.

    Args:
        num_positions: positions that the RoPE tables cover; by default the model's own maximum
            plus a margin for drafts.
        parallel: the ranks that the model is divided among.

    Attributes:
        vocab: this rank's part of the vocabulary, of embedding and head.
        draft_tokens: [n] int64 columns of `logits` that `draft_logits` has; None for all.
        kv_shape: layers, this rank's key/value heads, and head size of the KV pool.

    Raises:
        ValueError: so many ranks cannot divide it.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: TorchOps,
        device: torch.device,
        dtype: torch.dtype,
        num_positions: int | None = None,
        parallel: Parallel = SINGLE,
    ):
        super().__init__()
        self.config, self.ops, self.device, self.dtype = config, ops, device, dtype
        self.parallel = parallel
        widths = {"intermediate_size": config.intermediate_size, "vocab_size": config.vocab_size}
        parallel.check_shapes("target", config.num_heads, config.num_kv_heads, **widths)
        self.vocab = parallel.part(config.vocab_size)
        self.embedding: Any = None
        self.head = Linear(ops, config.hidden_size, {"lm_head": self.vocab})
        self.draft_head: Any = None
        self.draft_tokens: Tensor | None = None
        self._draft_rows: Any = None
        self.layers = [DecoderLayer(config, ops, parallel) for _ in range(config.num_layers)]
        self.kv_shape = (config.num_layers, self.layers[0].attention.kv_heads, config.head_dim)
        self.traced = TracedLayers(self.layers, config, ops, parallel)
        self.norm = RMSNorm(ops, config.hidden_size, config.rms_norm_eps)
        num_positions = num_positions or config.max_position_embeddings + ROPE_MARGIN
        self.rope = Rope(config.rope, config.head_dim, num_positions, device)

    def load(
        self, checkpoint: Checkpoint, drafts: bool = False, draft_tokens: Tensor | None = None
    ) -> None:
        """Fill every weight from `checkpoint`.

        Args:
            drafts: whether `draft_logits` will be called.
            draft_tokens: [n] int64 ascending tokens that it is for; None for all.

        Raises:
            ValueError: a tensor is missing or has another shape.
        """
        # The largest weights first: their packing needs the most room beside them.
        shape = (self.vocab, self.config.hidden_size)
        if self.config.tie_word_embeddings:
            self.embedding, self.head.weight = checkpoint.tied("model.embed_tokens.weight", shape)
            checkpoint.ignore("lm_head.weight", shape)
        else:
            if "lm_head.weight" not in checkpoint:
                raise ValueError(
                    f"{checkpoint.folder}: tensor lm_head.weight is missing, and config.json says "
                    "tie_word_embeddings is false"
                )
            self.head.load(checkpoint)
        if drafts:
            name = "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"
            self._make_draft_head(partial(checkpoint.read, f"{name}.weight", shape), draft_tokens)
        if not self.config.tie_word_embeddings:
            self.embedding = checkpoint.read("model.embed_tokens.weight", shape)
        for index, layer in enumerate(self.layers):
            layer.load(checkpoint, f"model.layers.{index}.")
            checkpoint.ignore(f"model.layers.{index}.self_attn.rotary_emb.inv_freq")
        self.norm.load(checkpoint, "model.norm")

    def _make_draft_head(self, read: Callable[[], Tensor], tokens: Tensor | None) -> None:
        """`read` gives the head's weight; the tokens are those of all ranks."""
        count = self.vocab.size
        if tokens is not None:
            local = tokens - self.vocab.start
            local = local[(local >= 0) & (local < count)].to(self.device)
            self.draft_tokens, count, whole, there = local, len(local), read, self.head.weight

            def read() -> Tensor:
                return (there if isinstance(there, Tensor) else whole())[local]

        self.draft_head = self.ops.draft_head(read, count * self.config.hidden_size)
        if self.draft_head is None and tokens is not None:
            self._draft_rows = self.ops.pack_linear(read())

    def views(self, kind: str) -> tuple[View, ...]:
        """The attention views that a forward of `kind` ("causal" or "tree") uses."""
        return ((kind, 0),)

    def embed(self, tokens: Tensor) -> Tensor:
        """`tokens [B, T]` -> embeddings `[B, T, H]`; every rank looks up its own tokens."""
        if self.vocab.whole:
            return nn.functional.embedding(tokens, self.embedding).to(self.dtype)
        local = tokens - self.vocab.start
        inside = (local >= 0) & (local < self.vocab.size)
        found = nn.functional.embedding(torch.where(inside, local, 0), self.embedding)
        return self.parallel.all_sum(torch.where(inside[..., None], found, 0.0).to(self.dtype))

    def forward(
        self, tokens: Tensor, state: StepState, kv: Tensor, taps: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """Run the decoder on `tokens [B, T]`.

        Args:
            state: positions, slots and the attention plan, made for one of `self.views`.
            kv: [layers, slots, 2, Hkv, D] paged K/V; the tokens' own are written at state.slots.
            taps: 0-based layers whose residual stream is wanted, in the order wanted.

        Returns:
            The hidden states `[B, T, H]` after the final norm, and the features
            `[B, T, M * H]`: the residual stream after each tapped layer, no final norm (None
            without taps).
        """
        (view,) = state.plan.views
        cos, sin = self.rope(state.positions)
        x = self.embed(tokens)
        views = (view,) * len(self.layers)
        x, tapped = self.traced.run(x, cos, sin, state, kv, views, taps)
        features = torch.cat(tapped, dim=-1) if taps else None
        return self.norm(x), features

    def logits(self, hidden: Tensor) -> Tensor:
        """Final hidden states `[..., H]`, of the target or its drafter -> float32 `[..., V]`.

        With several ranks V is `vocab.size`.
        """
        return self.head(hidden.to(self.dtype)).float()

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """As `logits`, of the drafter's hidden states; cheaper and a little less exact on CPU.

        Of the columns `draft_tokens` only, where the drafter knows no others.
        """
        if self.draft_head is not None:
            return self.draft_head(hidden)
        if self.draft_tokens is None:
            return self.logits(hidden)
        return self.ops.linear(hidden.to(self.dtype), self._draft_rows).float()
