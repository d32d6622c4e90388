"""Which model class runs which checkpoint, and how one is built from a folder."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ddtree.config import ModelConfig, load_draft_config, load_target_config
from ddtree.kernels.reference import TorchOps
from ddtree.models.dflash import DFlash, read_draft_tokens
from ddtree.models.layers import ROPE_MARGIN
from ddtree.models.llama import Llama
from ddtree.models.loader import Checkpoint, resolve
from ddtree.models.qwen3 import Qwen3
from ddtree.parallel import SINGLE, Parallel

__all__ = ["DRAFTERS", "TARGETS", "build_drafter", "build_models", "build_target", "resolve"]

TARGETS: dict[str, type[Llama]] = {"LlamaForCausalLM": Llama, "Qwen3ForCausalLM": Qwen3}
DRAFTERS: dict[str, type[DFlash]] = {"DFlashDraftModel": DFlash}

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build_target(
    folder: str | Path,
    ops: TorchOps,
    device: torch.device,
    dtype: torch.dtype,
    num_positions: int | None = None,
    progress: bool | None = None,
    parallel: Parallel = SINGLE,
    drafts: bool = False,
    draft_tokens: Tensor | None = None,
) -> Llama:
    """Build the target in `folder` and load its weights.

    Args:
        num_positions: positions that the RoPE tables cover; by default the model's own maximum
            plus a margin for drafts.
        progress: show a progress bar; None shows it for big checkpoints only.
        parallel: the ranks that the model is divided among.
        drafts: whether a drafter uses its head, too.
        draft_tokens: [n] int64 ascending, those that it drafts; None for all.

    Raises:
        ValueError: the architecture or an option of it is not supported, or the checkpoint is not
            complete; the message names what is wrong.
    """
    config = load_target_config(folder)
    model = TARGETS[config.architecture](config, ops, device, dtype, num_positions, parallel)
    with Checkpoint(folder, ops, device, dtype, progress=progress) as checkpoint:
        model.load(checkpoint, drafts, draft_tokens)
    return model.eval()


def build_drafter(
    folder: str | Path,
    target: ModelConfig,
    ops: TorchOps,
    device: torch.device,
    dtype: torch.dtype,
    num_positions: int | None = None,
    progress: bool | None = None,
    parallel: Parallel = SINGLE,
) -> DFlash:
    """Build the drafter in `folder` for `target` and load its weights.

    Args:
        dtype: bfloat16 or float32; DFlash activations leave float16's range.
        num_positions: positions that the RoPE tables cover; by default as many as the target's.
        progress: show a progress bar; None shows it for big checkpoints only.
        parallel: the ranks that the model is divided among.

    Raises:
        ValueError: as `build_target`, or the drafter does not go with the target.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dtype: a drafter runs in bfloat16 or float32, got {dtype}")
    config = load_draft_config(folder, target)
    num_positions = num_positions or target.max_position_embeddings + ROPE_MARGIN
    model = DFlash(config, ops, device, dtype, num_positions, parallel)
    with Checkpoint(folder, ops, device, dtype, "model.", True, progress) as checkpoint:
        model.load(checkpoint)
    return model.eval()


def build_models(
    target: Path,
    draft: Path | None,
    ops: TorchOps,
    device: torch.device,
    dtype: str | torch.dtype | None,
    parallel: Parallel = SINGLE,
) -> tuple[Llama, DFlash | None]:
    """Build what an engine runs.

    Args:
        dtype: by default float32 on CPU, elsewhere the target's own. A drafter of a float16 target
            runs in bfloat16.

    Raises:
        ValueError: as `build_target` and `build_drafter`, or `dtype` is none of `DTYPES`.
    """
    config = load_target_config(target)
    if dtype is None:
        dtype = "float32" if device.type == "cpu" else config.torch_dtype
    found = DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if found is None or found not in DTYPES.values():
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if draft is None:
        return build_target(target, ops, device, found, parallel=parallel), None
    shapes, safe = load_draft_config(draft, config), found
    if found == torch.float16:
        safe = torch.bfloat16
    tables = Checkpoint(draft, ops, device, safe, strip="model.", progress=False)
    tokens = read_draft_tokens(tables, shapes, config.vocab_size)
    built = build_target(
        target, ops, device, found, parallel=parallel, drafts=True, draft_tokens=tokens
    )
    return built, build_drafter(draft, config, ops, device, safe, parallel=parallel)
