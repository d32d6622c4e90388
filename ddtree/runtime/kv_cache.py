"""The paged KV memory: one pool for the target, one for the drafter, indexed by the same slots."""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor

from ddtree.runtime.pages import RESERVED_PAGES


def bytes_per_token(kv_shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Bytes of keys and values that one token takes in a pool of layers, heads and head size."""
    return 2 * math.prod(kv_shape) * dtype.itemsize


def allocate_pool(
    layers: int,
    kv_heads: int,
    head_dim: int,
    num_pages: int,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Make a pool `[layers, slots, 2, kv_heads, head_dim]` of zeros; 2 = keys, values.

    `num_pages` counts usable pages; the reserved ones come on top.
    """
    slots = (num_pages + RESERVED_PAGES) * page_size
    return torch.zeros(layers, slots, 2, kv_heads, head_dim, dtype=dtype, device=device)


def slots_of(block_table: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """KV slots `[B, n]` of the positions `[B, n]` of rows with block tables `[B, P]`."""
    page = block_table.gather(1, positions // page_size)
    return page * page_size + positions % page_size


def default_num_pages(
    token_bytes: int,
    max_batch_size: int,
    table_width: int,
    page_size: int,
    memory_fraction: float,
    device: torch.device,
) -> int:
    """Pages for `max_batch_size` rows of `table_width` pages, as far as memory goes.

    On CPU at most a quarter of the free memory; on CUDA what is left of `memory_fraction` of the
    device's memory, the models being loaded already.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        memory = int(free - (1 - memory_fraction) * total)
    else:
        memory = _free_host_memory() // 4
    return max(1, min(max_batch_size * table_width, memory // (token_bytes * page_size)))


def _free_host_memory() -> int:
    """Bytes of host memory that can be had without swapping."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
