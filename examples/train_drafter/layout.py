"""Drafter folders in the published DFlash layout: made new, read to go on from, written."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ddtree.config import CALIBRATION_FILE, DraftConfig, load_draft_config, load_target_config

from .drafter import TrainableDrafter
from .target import read_tensor

TOKEN_TABLES = ("d2t", "t2d")
"""Tensors that say which tokens are drafted; `shorten` makes the first."""


def default_taps(num_layers: int, count: int = 5) -> list[int]:
    """`count` target layers spread evenly from the second to the third from last."""
    first, last = 1, max(1, num_layers - 3)
    return sorted({round(first + (last - first) * i / max(1, count - 1)) for i in range(count)})


def new_config(
    target: Path,
    layers: int = 2,
    block_size: int = 6,
    taps: list[int] | None = None,
    mask_token: int | None = None,
    intermediate_size: int | None = None,
) -> dict:
    """The config.json of a new drafter that has the shapes of its target's own layers.

    Raises:
        ValueError: the target's config.json lacks an entry, or the drafter would not fit it; the
            entry is named.
    """
    load_target_config(target)
    path = target / "config.json"
    try:
        config = _new_config(
            json.loads(path.read_text()), layers, block_size, taps, mask_token, intermediate_size
        )
    except KeyError as error:
        raise ValueError(f"target: {path} must have an entry {error}") from error
    check_config(config, target)
    return config


def _new_config(
    of_target: dict,
    layers: int,
    block_size: int,
    taps: list[int] | None,
    mask_token: int | None,
    intermediate_size: int | None,
) -> dict:
    if intermediate_size is None:
        intermediate_size = of_target["intermediate_size"]
    heads = of_target["num_attention_heads"]
    hidden = of_target["hidden_size"]
    rope = of_target.get("rope_parameters") or {
        "rope_type": "default",
        "rope_theta": of_target.get("rope_theta", 10000.0),
    }
    depth = of_target["num_hidden_layers"]
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": of_target.get("num_key_value_heads", heads),
        "head_dim": of_target.get("head_dim") or hidden // heads,
        "intermediate_size": intermediate_size,
        "rms_norm_eps": of_target["rms_norm_eps"],
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_parameters": rope,
        "vocab_size": of_target["vocab_size"],
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": of_target["max_position_embeddings"],
        "num_target_layers": depth,
        "block_size": block_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "dflash_config": {
            "target_layer_ids": list(taps or default_taps(depth)),
            "mask_token_id": of_target["vocab_size"] - 1 if mask_token is None else mask_token,
        },
    }


def check_config(config: dict, target: Path) -> DraftConfig:
    """What the engine makes of a drafter's config.json.

    Raises:
        ValueError: as `read_config`.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_config(Path(folder), config)
        return read_config(Path(folder), target)


def without_shortlist(config: dict) -> dict:
    """The config of the same drafter for the whole vocabulary, as `save_drafter` writes it."""
    nested = config.get("dflash_config") or {}
    config = {k: v for k, v in config.items() if k != "draft_vocab_size"}
    return config | {"dflash_config": {k: v for k, v in nested.items() if k != "draft_vocab_size"}}


def write_config(folder: Path, config: dict) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".config.json.{os.getpid()}"
    temporary.write_text(json.dumps(config, indent=1) + "\n")
    os.replace(temporary, folder / "config.json")


def read_config(folder: Path, target: Path) -> DraftConfig:
    """The engine's own reading of a drafter folder, which also refuses one of another target.

    Raises:
        ValueError: not a DFlash config, or one that does not fit the target; the field is named.
    """
    return load_draft_config(folder, load_target_config(target))


def initial_weights(model: TrainableDrafter, generator: torch.Generator) -> None:
    """Random weights; norms at one."""
    for name, tensor in sorted(model.state_dict().items()):
        if tensor.dim() == 2:
            std = 0.02 if tensor.shape[0] == tensor.shape[1] else tensor.shape[1] ** -0.5 / 2
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)
        else:
            tensor.fill_(0.0 if name.endswith("bias") else 1.0)


def copy_target_layers(model: TrainableDrafter, target: Path, num_layers: int) -> int:
    """Start the drafter's layers from the target's last ones; returns how many tensors fitted."""
    own = len(model.layers)
    copied = 0
    for name, tensor in model.state_dict().items():
        parts = name.split(".")
        if parts[0] == "layers":
            parts[1] = str(num_layers - own + int(parts[1]))
        elif name != "norm.weight":
            continue
        source = read_tensor(target, "model." + ".".join(parts))
        if source is not None and source.shape == tensor.shape:
            tensor.copy_(source.float())
            copied += 1
    return copied


def load_weights(model: TrainableDrafter, folder: Path) -> None:
    """Load a drafter folder's weights, with or without the `model.` prefix.

    Raises:
        ValueError: a tensor is missing, unknown or of another shape; the first is named.
    """
    own = model.state_dict()
    given = {name.removeprefix("model."): tensor for name, tensor in _read_weights(folder).items()}
    for name in sorted(own.keys() | given.keys()):
        if name not in given or name not in own:
            what = "lacks" if name in own else "has an unknown tensor"
            raise ValueError(f"init: the drafter in {folder} {what} {name}")
        if own[name].shape != given[name].shape:
            raise ValueError(
                f"init: {name} of the drafter in {folder} has shape {list(given[name].shape)}, "
                f"its config asks for {list(own[name].shape)}"
            )
        own[name].copy_(given[name].float())


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of a drafter folder, but for the tables of a shortlist."""
    path = folder / "model.safetensors"
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"draft: {path} must hold the drafter's weights: {error}") from error
    return {n: t for n, t in tensors.items() if n.removeprefix("model.") not in TOKEN_TABLES}


def save_drafter(folder: Path, config: dict, weights: dict[str, Tensor]) -> None:
    """Write a loadable drafter folder in bfloat16, the weights atomically and last.

    A calibration of the weights before is taken away.
    """
    (folder / CALIBRATION_FILE).unlink(missing_ok=True)
    write_config(folder, config)
    temporary = folder / f".model.{os.getpid()}"
    save_file(
        {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()},
        temporary,
        metadata={"format": "pt"},
    )
    os.replace(temporary, folder / "model.safetensors")


def shorten(folder: Path, tokens: Tensor) -> None:
    """Let the drafter in `folder` draft `tokens [n]` int64, ascending, only.

    Its config.json gets `draft_vocab_size`, its weights the table `d2t` of EAGLE-3's checkpoints:
    draft token i is the target's token `i + d2t[i]`. A calibration, which was fitted to other
    candidates, is taken away.

    Raises:
        ValueError: the weights cannot be read.
    """
    config = without_shortlist(json.loads((folder / "config.json").read_text()))
    weights = _read_weights(folder)
    weights["d2t"] = (tokens - torch.arange(len(tokens))).to(torch.int32)
    temporary = folder / f".model.{os.getpid()}"
    save_file(weights, temporary, metadata={"format": "pt"})
    (folder / CALIBRATION_FILE).unlink(missing_ok=True)
    write_config(folder, config | {"draft_vocab_size": len(tokens)})
    os.replace(temporary, folder / "model.safetensors")
