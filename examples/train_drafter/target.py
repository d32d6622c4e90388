"""What training needs of the target's checkpoint: embedding, head, shapes and a fingerprint."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
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
    """One tensor of a safetensors checkpoint by name, or None where it has none of that name.

    Raises:
        ValueError: its file is missing or damaged; it is named.
    """
    path = _file_of(folder, name)
    if path is None:
        return None
    try:
        with safe_open(path, "pt") as checkpoint:
            if name not in checkpoint.keys():  # noqa: SIM118 - safe_open is no mapping
                return None
            return checkpoint.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"target: {path} must hold the target's weights: {error}") from error


def _file_of(folder: Path, name: str) -> Path | None:
    """The file that should hold a tensor; None where the index knows of none."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return folder / "model.safetensors"
    try:
        file = json.loads(index.read_text(encoding="utf-8"))["weight_map"].get(name)
        return None if file is None else folder / file
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"target: {index} has no valid weight_map: {error!r}") from error


def load_target_weights(folder: Path) -> TargetWeights:
    """Embedding and head of a target folder; a tied head is the embedding itself.

    Raises:
        ValueError: the folder holds no safetensors checkpoint of a causal LM.
    """
    embedding = _needed(folder, "model.embed_tokens.weight").float()
    head = read_tensor(folder, "lm_head.weight")
    head = embedding if head is None else head.float()
    return TargetWeights(embedding, head, fingerprint(folder))


def fingerprint(folder: Path) -> int:
    """A number that tells targets apart: a checksum of the final norm.

    Raises:
        ValueError: the folder holds no safetensors checkpoint of a causal LM.
    """
    return zlib.crc32(_needed(folder, "model.norm.weight").float().numpy().tobytes())


def _needed(folder: Path, name: str) -> Tensor:
    tensor = read_tensor(folder, name)
    if tensor is None:
        raise ValueError(f"target: {folder} has no {name}")
    return tensor
