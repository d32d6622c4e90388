"""Qwen3 target: the Llama decoder with a norm on every query and key head."""

from ddtree.models.llama import Llama


class Qwen3(Llama):
    """Differs from Llama by `config.qk_norm` only, which `layers.Attention` honours."""
