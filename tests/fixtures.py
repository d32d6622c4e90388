"""Makes small random checkpoints, and drives the models built from them by hand."""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ddtree.config import LayerConfig
from ddtree.kernels import get_ops
from ddtree.runtime.pages import RESERVED_PAGES
from ddtree.state import StepState

TINY: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 99,
    "pad_token_id": 0,
}
"""TINY: head_dim is not hidden_size / heads, four queries share a key, an odd vocabulary."""
TINY_EOS = [99, 100]
"""TINY's end-of-sequence ids, a list as in many chat models' generation_config.json."""
TINY_TAPS = (0, 1, 3)
TINY_MASK = 98

_ROOT = tempfile.TemporaryDirectory(prefix="ddtree-tests-")
_COUNT = itertools.count()


def new_folder() -> Path:
    """An empty folder that is removed when the test process ends."""
    folder = Path(_ROOT.name) / str(next(_COUNT))
    folder.mkdir()
    return folder


def make_target(
    architecture: str = "llama",
    folder: Path | None = None,
    seed: int = 0,
    eos: int | list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a random target with `save_pretrained`, and return its folder.

    Norms and biases are random too, so that leaving one out changes the output.

    Args:
        architecture: "llama" or "qwen3".
        eos: what generation_config.json lists; TINY_EOS by default.
        overrides: entries of the transformers config that differ from TINY.
    """
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    kinds = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    make_config, make_model = kinds[architecture]
    torch.manual_seed(seed)
    model = make_model(make_config(**{**TINY, **overrides}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.6, 1.4)
            elif name.endswith(".bias"):
                weight.normal_(0, 0.2)
    model.generation_config.eos_token_id = TINY_EOS if eos is None else eos
    folder = folder or new_folder()
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    return folder


def make_drafter(
    target: Path,
    folder: Path | None = None,
    seed: int = 1,
    num_layers: int = 2,
    block_size: int = 6,
    taps: tuple[int, ...] = TINY_TAPS,
    mask_token_id: int = TINY_MASK,
    dtype: torch.dtype = torch.float32,
    prefix: str = "",
    draft_tokens: Sequence[int] | None = None,
    **overrides: Any,
) -> Path:
    """Write a random DFlash drafter for the target in `target`, and return its folder.

    Args:
        prefix: what the tensor names begin with, "" or "model.".
        draft_tokens: the target's tokens that it drafts; None for all.
        overrides: entries of the drafter's config.json, such as `layer_types`, `sliding_window`,
            `is_causal`, or `dflash_config` (merged into the default one).
    """
    base = json.loads((target / "config.json").read_text())
    dflash = {"target_layer_ids": list(taps), "mask_token_id": mask_token_id}
    dflash |= overrides.pop("dflash_config", {})
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": base["hidden_size"],
        "intermediate_size": 80,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "vocab_size": base["vocab_size"],
        "max_position_embeddings": base["max_position_embeddings"],
        "num_target_layers": base["num_hidden_layers"],
        "block_size": block_size,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "dflash_config": dflash,
        **overrides,
    }
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        prefix + name: _random_weight(name, shape, generator).to(dtype)
        for name, shape in drafter_shapes(config).items()
    }
    if draft_tokens is not None:
        config["draft_vocab_size"] = len(draft_tokens)
        offsets = [token - place for place, token in enumerate(draft_tokens)]
        tensors[prefix + "d2t"] = torch.tensor(offsets, dtype=torch.int64)
    folder = folder or new_folder()
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def drafter_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a published DFlash drafter, name -> shape."""
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    width, kv_width = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    taps = len(config["dflash_config"]["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, taps * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (width, hidden),
            "self_attn.k_proj": (kv_width, hidden),
            "self_attn.v_proj": (kv_width, hidden),
            "self_attn.o_proj": (hidden, width),
            "self_attn.q_norm": (dim,),
            "self_attn.k_norm": (dim,),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
        }.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
    return shapes


def _random_weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if "norm" in name:
        return torch.rand(shape, generator=generator) * 0.8 + 0.6
    return torch.randn(shape, generator=generator) * 0.25


@functools.cache
def tiny_target(architecture: str = "llama") -> Path:
    """Folder of TINY ("llama" or "qwen3"), made once per process."""
    return make_target(architecture)


@functools.cache
def tiny_drafter(architecture: str = "llama") -> Path:
    """Folder of a random drafter for TINY, made once per process; it accepts next to nothing."""
    return make_drafter(tiny_target(architecture))


def edit_config(folder: Path, name: str = "config.json", **changes: Any) -> None:
    """Change entries of a checkpoint's JSON file; None removes an entry."""
    path = folder / name
    values = json.loads(path.read_text())
    values.update(changes)
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))


class PagedCache:
    """KV pages of a few rows, shuffled over the pool, for forwards without a scheduler."""

    def __init__(
        self,
        config: LayerConfig,
        batch: int,
        capacity: int = 128,
        page_size: int = 4,
        dtype: torch.dtype = torch.float32,
    ):
        self.ops = get_ops("torch", torch.device("cpu"))
        self.page_size = page_size
        pages = -(-capacity // page_size)
        order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(5))
        self.block_table = (order + RESERVED_PAGES).view(batch, pages)
        slots = (RESERVED_PAGES + batch * pages) * page_size
        self.kv = torch.zeros(
            config.num_layers, slots, 2, config.num_kv_heads, config.head_dim, dtype=dtype
        )

    def slots(self, rows: torch.Tensor) -> torch.Tensor:
        """KV slots `[B, T]` of the rows' positions `[B, T]`."""
        pages = self.block_table.gather(1, rows // self.page_size)
        return pages * self.page_size + rows % self.page_size

    def state(
        self,
        prefix: torch.Tensor,
        count: int,
        views: tuple[tuple[str, int], ...],
        words: torch.Tensor | None = None,
        depths: torch.Tensor | None = None,
    ) -> StepState:
        """What a forward of `count` tokens behind `prefix [B]` committed rows is told."""
        rows = prefix[:, None] + torch.arange(count)
        plan = self.ops.plan_attention(
            self.block_table, prefix, count, self.page_size, views, words=words
        )
        positions = rows if depths is None else prefix[:, None] + depths
        return StepState(positions, self.slots(rows), plan)
