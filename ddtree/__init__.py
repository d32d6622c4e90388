"""LLM generation with diffusion draft trees: `from ddtree import Engine, SamplingParams`."""

from ddtree.config import SamplingParams
from ddtree.engine import Delta, Engine
from ddtree.runtime.request import RequestOutput
from ddtree.trace import draw_tree

__all__ = ["Delta", "Engine", "RequestOutput", "SamplingParams", "draw_tree"]
__version__ = "0.1.0"
