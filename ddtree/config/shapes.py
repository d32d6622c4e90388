"""The shapes of target and drafter, as their checkpoint folders describe them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddtree.config.calibration import Calibration, load_calibration
from ddtree.config.entries import (
    dtype_name,
    find_architecture,
    is_int,
    positive,
    read_json,
    refuse,
)

TARGET_ARCHITECTURES = {"LlamaForCausalLM": "llama", "Qwen3ForCausalLM": "qwen3"}
"""Target architectures that we run, with the `model_type` that goes with each."""
DRAFT_ARCHITECTURES = ("DFlashDraftModel",)
"""Drafter architectures that we run."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""RoPE variants that we run."""

View = tuple[str, int]
"""How a layer looks at its own block: (``"causal" | "full"``, sliding window or 0 for none)."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of one model; all fields but `theta` matter to the scaled types only."""

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """The shapes that target and drafter layers have in common."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    attention_bias: bool
    mlp_bias: bool
    qk_norm: bool
    torch_dtype: str
    """Name of the checkpoint's dtype, such as ``"bfloat16"``."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig(LayerConfig):
    """A target model."""

    architecture: str
    vocab_size: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DraftConfig(LayerConfig):
    """A DFlash block drafter."""

    block_size: int
    """Tokens per block, the anchor included."""
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    """Tapped target layers, 0-based, in the order in which their features are concatenated."""
    layer_views: tuple[View, ...]
    """One view per drafter layer."""
    calibration: Calibration | None = None
    """None where the checkpoint has none."""
    draft_vocab_size: int | None = None
    """How many of the target's tokens it drafts, which its tensor `d2t` names; None for all."""
    input_embedding_scale: float = 1.0

    @property
    def depth(self) -> int:
        """`L`: how many tokens a block drafts."""
        return self.block_size - 1


def load_target_config(folder: str | Path) -> ModelConfig:
    """Read the shapes of the target in `folder` (config.json and generation_config.json).

    Raises:
        ValueError: config.json is missing, names an architecture or an option that we don't run,
            or asks for remote code (`auto_map`), which is never executed.
    """
    raw = read_json(Path(folder), "config.json")
    architecture = find_architecture(raw, tuple(TARGET_ARCHITECTURES), "target")
    if raw.get("auto_map"):
        raise ValueError(
            f"target: config.json asks for remote code (auto_map {raw['auto_map']!r}), which is "
            f"never run; remove auto_map if the model is a plain {architecture}"
        )
    if raw.get("model_type") != TARGET_ARCHITECTURES[architecture]:
        raise ValueError(
            f"target: {architecture} goes with model_type {TARGET_ARCHITECTURES[architecture]!r}, "
            f"but config.json has {raw.get('model_type')!r}"
        )
    from transformers import AutoConfig

    try:
        values = AutoConfig.from_pretrained(str(folder), trust_remote_code=False).to_dict()
    except Exception as error:
        raise ValueError(f"target: transformers refuses its config.json: {error}") from error
    refuse(values, "target", hidden_act="silu", quantization_config=None)
    if set(values.get("layer_types") or ()) - {"full_attention"}:
        raise ValueError(
            f'target: layer_types other than "full_attention" are not supported, '
            f"got {values['layer_types']}"
        )
    return ModelConfig(
        **_layer_shapes(values, "target"),
        mlp_bias=bool(values.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        torch_dtype=dtype_name(raw),
        architecture=architecture,
        vocab_size=positive(values, "vocab_size", "target"),
        tie_word_embeddings=bool(values.get("tie_word_embeddings", False)),
        eos_token_ids=_eos_token_ids(Path(folder), values),
    )


def load_draft_config(folder: str | Path, target: ModelConfig) -> DraftConfig:
    """Read the shapes of the DFlash drafter in `folder`, and check that it goes with `target`.

    `auto_map` is tolerated here: published drafters carry it, and our own code runs them.

    Raises:
        ValueError: a required entry is missing, an option is one that we don't run, or the
            drafter was made for another target.
    """
    raw = read_json(Path(folder), "config.json")
    find_architecture(raw, DRAFT_ARCHITECTURES, "draft")
    nested = raw.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise ValueError(f"draft: dflash_config must be an object, got {nested!r}")
    both = {**raw, **nested}
    refuse(both, "draft", hidden_act="silu", quantization_config=None)
    refuse(both, "draft", output_multiplier=1, final_logit_softcapping=0)
    refuse(both, "draft", attention_sink_bias=False, fc_norm=False)
    shapes = _layer_shapes(
        {"max_position_embeddings": target.max_position_embeddings} | raw, "draft"
    )
    if shapes["hidden_size"] != target.hidden_size:
        raise ValueError(
            f"draft: hidden_size {shapes['hidden_size']} differs from the target's "
            f"{target.hidden_size}; the drafter was made for another target"
        )
    taps = both.get("target_layer_ids")
    if not isinstance(taps, list) or not taps or not all(is_int(tap) for tap in taps):
        raise ValueError(
            "draft: config.json must list the tapped target layers as "
            f"dflash_config.target_layer_ids, got {taps!r}"
        )
    if not all(0 <= tap < target.num_layers for tap in taps):
        raise ValueError(
            f"draft: target_layer_ids must be layers of the target, 0..{target.num_layers - 1}, "
            f"got {taps}"
        )
    mask = both.get("mask_token_id")
    if not is_int(mask) or not 0 <= mask < target.vocab_size:
        raise ValueError(
            f"draft: mask_token_id must be in the target's vocabulary, 0..{target.vocab_size - 1}, "
            f"got {mask!r}"
        )
    drafted = both.get("draft_vocab_size")
    if drafted is not None and positive(both, "draft_vocab_size", "draft") > target.vocab_size:
        raise ValueError(
            f"draft: draft_vocab_size must be at most the target's vocabulary, "
            f"{target.vocab_size}, got {drafted}"
        )
    if positive(both, "block_size", "draft") < 2:
        raise ValueError("draft: block_size counts the anchor too and must be >= 2, got 1")
    scale = both.get("input_embedding_scale", 1.0)
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < math.inf:
        raise ValueError(f"draft: input_embedding_scale must be a number > 0, got {scale!r}")
    return DraftConfig(
        **shapes,
        mlp_bias=False,
        qk_norm=True,
        torch_dtype=dtype_name(raw),
        block_size=both["block_size"],
        mask_token_id=mask,
        target_layer_ids=tuple(taps),
        layer_views=_layer_views(both, shapes["num_layers"]),
        draft_vocab_size=drafted,
        calibration=load_calibration(Path(folder), both["block_size"] - 1),
        input_embedding_scale=float(scale),
    )


def _layer_views(values: dict[str, Any], num_layers: int) -> tuple[View, ...]:
    """Who a block token sees, layer by layer.

    A flag decides for all layers; without one, sliding layers are causal and full ones are
    bidirectional. As in transformers' Qwen3Config, layers from `max_window_layers` on slide when
    `use_sliding_window` is set without `layer_types`, and setting it to false takes the windows
    (not the kinds) away.
    """
    types = values.get("layer_types")
    if types is None:
        slides = values.get("use_sliding_window") and values.get("sliding_window")
        full = values.get("max_window_layers", 28) if slides else num_layers
        types = [
            "full_attention" if layer < full else "sliding_attention" for layer in range(num_layers)
        ]
    known = {"full_attention", "sliding_attention"}
    if not isinstance(types, list) or len(types) != num_layers or set(types) - known:
        raise ValueError(
            f'draft: layer_types must be "full_attention" or "sliding_attention" for each of the '
            f"{num_layers} layers, got {types!r}"
        )
    window = 0
    if "sliding_attention" in types and values.get("use_sliding_window") is not False:
        window = positive(values, "sliding_window", "draft")
    flags = {name: values.get(name) for name in ("is_causal", "causal", "causal_head")}
    given = {name: flag for name, flag in flags.items() if flag is not None}
    if not all(isinstance(flag, bool) for flag in given.values()):
        raise ValueError(f"draft: expected true or false, got {given}")
    causal = next(iter(given.values()), None)
    views = []
    for kind in types:
        sliding = kind == "sliding_attention"
        kind = "causal" if (sliding if causal is None else causal) else "full"
        views.append((kind, window if sliding else 0))
    return tuple(views)


def _layer_shapes(values: dict[str, Any], role: str) -> dict[str, Any]:
    heads = positive(values, "num_attention_heads", role)
    kv_heads = heads
    if values.get("num_key_value_heads") is not None:
        kv_heads = positive(values, "num_key_value_heads", role)
    if heads % kv_heads:
        raise ValueError(
            f"{role}: num_attention_heads {heads} is not a multiple of num_key_value_heads "
            f"{kv_heads}"
        )
    hidden = positive(values, "hidden_size", role)
    head_dim = hidden // heads
    if values.get("head_dim") is not None:
        head_dim = positive(values, "head_dim", role)
    if head_dim % 2:
        raise ValueError(f"{role}: head_dim must be even for RoPE, got {head_dim}")
    positions = positive(values, "max_position_embeddings", role)
    return {
        "hidden_size": hidden,
        "intermediate_size": positive(values, "intermediate_size", role),
        "num_layers": positive(values, "num_hidden_layers", role),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": float(values.get("rms_norm_eps", 1e-6)),
        "rope": _rope(values, role, positions),
        "max_position_embeddings": positions,
        "attention_bias": bool(values.get("attention_bias", False)),
    }


def _rope(values: dict[str, Any], role: str, max_positions: int) -> RopeConfig:
    """Read either shape: `rope_parameters`, or `rope_theta` beside `rope_scaling`."""
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if any(isinstance(entry, dict) for entry in rope.values()):
        raise ValueError(f"{role}: RoPE parameters per layer type are not supported, got {rope}")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ValueError(f"{role}: RoPE type {kind!r} is not supported, only {ROPE_TYPES}")
    partial = rope.get("partial_rotary_factor", values.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ValueError(f"{role}: partial_rotary_factor {partial} is not supported, only 1")
    key = "original_max_position_embeddings"
    original = values.get(key) or rope.get(key) or max_positions
    scaling: dict[str, Any] = {
        name: rope[name]
        for name in RopeConfig.__dataclass_fields__
        if name != "type" and rope.get(name) is not None
    }
    if kind == "yarn":
        scaling.setdefault("factor", max_positions / original)
    if kind != "default" and "factor" not in scaling:
        raise ValueError(f"{role}: RoPE type {kind!r} needs a factor, got {rope}")
    theta = rope.get("rope_theta") or values.get("rope_theta") or 10000.0
    scaling |= {"type": kind, "theta": theta, "original_max_positions": original}
    return RopeConfig(**scaling)


def _eos_token_ids(folder: Path, values: dict[str, Any]) -> tuple[int, ...]:
    """The ids of generation_config.json where it has some, else those of config.json."""
    found = None
    if (folder / "generation_config.json").is_file():
        found = read_json(folder, "generation_config.json").get("eos_token_id")
    if found is None:
        found = values.get("eos_token_id")
    ids = [] if found is None else found if isinstance(found, list) else [found]
    for token in ids:
        if not is_int(token) or not 0 <= token < values["vocab_size"]:
            raise ValueError(f"target: eos_token_id {token!r} is not in its vocabulary")
    return tuple(ids)
