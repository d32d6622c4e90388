"""From hidden states to chosen tokens, in row chunks so that logits never fill the memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_LOGITS = 1 << 25
"""Logits held at once: 128 MiB in float32."""


def choose(target: Any, ops: Any, hidden: Tensor) -> Tensor:
    """The target's token after every position of `hidden [B, T, H]` -> `[B, T]` int64."""
    batch, tokens, _ = hidden.shape
    rows = hidden.reshape(batch * tokens, -1)
    step = max(1, CHUNK_LOGITS // target.config.vocab_size)
    parts = [ops.argmax(target.logits(part)) for part in rows.split(step)]
    chosen = parts[0] if len(parts) == 1 else torch.cat(parts)
    return chosen.view(batch, tokens)
