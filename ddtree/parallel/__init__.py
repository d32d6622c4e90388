"""Tensor parallelism: how models are divided among ranks, and what the ranks say to each other."""

from ddtree.parallel.connect import connect, place
from ddtree.parallel.shards import SINGLE, Parallel, Part

__all__ = ["SINGLE", "Parallel", "Part", "connect", "place"]
