"""What training needs of the target's checkpoint: embedding, head, shapes and a fingerprint."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor


@dataclass(frozen=True)
class TargetWeights:
    """Frozen tensors of a target folder: `embedding` and `head`, both float32 `[V, H]`."""

    embedding: Tensor
    head: Tensor
    fingerprint: int

    def to(self, device: torch.device) -> TargetWeights:
        """The same weights on `device`; a tied head stays the embedding."""
        embedding = self.embedding.to(device)
        head = embedding if self.head is self.embedding else self.head.to(device)
        return TargetWeights(embedding, head, self.fingerprint)


def read_tensor(folder: Path, name: str) -> Tensor | None:
    """One tensor of a safetensors checkpoint by name, or None where it has none of that name."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        file = json.loads(index.read_text())["weight_map"].get(name)
        if file is None:
            return None
        path = folder / file
    else:
        path = folder / "model.safetensors"
    with safe_open(path, "pt") as checkpoint:
        if name not in checkpoint.keys():  # noqa: SIM118 - safe_open is no mapping
            return None
        return checkpoint.get_tensor(name)


def load_target_weights(folder: Path) -> TargetWeights:
    """Embedding and head of a target folder; a tied head is the embedding itself.

    Raises:
        ValueError: the folder holds no safetensors checkpoint of a causal LM.
    """
    try:
        embedding = read_tensor(folder, "model.embed_tokens.weight")
        norm = read_tensor(folder, "model.norm.weight")
        head = read_tensor(folder, "lm_head.weight")
    except (OSError, FileNotFoundError) as error:
        raise ValueError(f"target: no safetensors checkpoint in {folder}: {error}") from error
    if embedding is None or norm is None:
        raise ValueError(f"target: {folder} has no model.embed_tokens.weight or model.norm.weight")
    embedding = embedding.float()
    mark = zlib.crc32(norm.float().numpy().tobytes())
    return TargetWeights(embedding, embedding if head is None else head.float(), mark)
