"""What the layers of one forward share for attention over pages, and how a launch is cut."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ddtree.kernels.checks import FLOATS, describe, power_of_two
from ddtree.kernels.reference import View

KINDS = {"causal": 0, "full": 1, "tree": 2}
"""The kinds of views, as the kernels number them."""
INTEGERS = (torch.int32, torch.int64)
MAX_SPLITS = 32
MERGE_ELEMENTS = 4096
"""Partial results that one program of the merge holds in registers."""


@dataclass(frozen=True)
class Tile:
    """How one attention launch is cut: a block's rows and keys, warps, and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Chip:
    """What launches are cut for."""

    multiprocessors: int = 132
    lean: bool = False
    """Matrix products read their operands from registers: before sm_90, and on AMD."""
    hip: bool = False


@functools.cache
def chip_of(device: torch.device) -> Chip:
    """The chip of a CUDA or ROCm device. Triton's interpreter runs one program at a time."""
    if device.type != "cuda":
        return Chip(multiprocessors=1)
    properties = torch.cuda.get_device_properties(device)
    hip = torch.version.hip is not None
    return Chip(properties.multi_processor_count, hip or properties.major < 9, hip)


def choose_tile(rows: int, head_dim: int, itemsize: int, chip: Chip) -> Tile:
    """The tile for `rows` = T * G packed query rows.

    Bounded by registers (the float32 accumulator is rows x head_dim, and float32 products take no
    tensor cores) and by the smallest shared memory of the chips we compile for: 163 KB on sm_80,
    64 KB on gfx942. The page numbers are a load before the loads, and triton gives each its share
    of the stages: with 5 there are two blocks of keys and values under way, with 3 none.
    """
    if itemsize == 4:
        return Tile(16, 16, 4, 1)
    wide = head_dim > 128
    block = min(max(power_of_two(rows), 16), 64 if wide else 128)
    warps = 8 if block == 128 or (block == 64 and wide and not chip.hip) else 4
    return Tile(block, 32 if wide or chip.lean else 64, warps, 2 if chip.hip else 5)


def choose_splits(programs: int, batch: int, key_blocks: int, multiprocessors: int) -> int:
    """Splits of the keys, from shapes only: enough programs to fill the device, no more.

    A split more costs its partial results, a float32 copy of the output. With several rows,
    whose lengths differ, twice as many programs as multiprocessors even the load out.
    """
    wanted = multiprocessors * (1 if batch == 1 else 2) // programs
    return max(1, min(wanted, key_blocks, MAX_SPLITS))


def tile_constants(tile: Tile, kind: str) -> dict[str, int]:
    """The constants of a launch of `attention_kernel` that follow from its tile."""
    # A tree has few blocks of its own; pipelining them costs the prefix's loop registers.
    stages = 1 if kind == "tree" else tile.stages
    return {"BLOCK_M": tile.rows, "BLOCK_N": tile.keys, "OWN_STAGES": stages}


def merge_rows(splits: int, dim: int) -> int:
    """Rows that one program of the merge takes, of `splits` and `dim` numbers each."""
    return max(1, MERGE_ELEMENTS // (splits * dim))


@dataclass
class PagedPlan:
    """What all layers of one forward share: the caller's device tensors, as they are."""

    block_table: Tensor
    """[B, P] integer pages."""
    prefix_len: Tensor
    """[B] integer number of committed keys."""
    words: Tensor | None
    """[B, T, W] int64 ancestor-or-self bits, for "tree" views."""
    num_tokens: int
    page_size: int
    views: tuple[View, ...]
    flash: dict[str, Tensor] = field(default_factory=dict)
    """What flash-attn takes instead, made by the first layer that goes to it."""

    def narrow(self, kv: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """As `AttentionPlan.narrow`: the kernels take all of the pool."""
        return kv, slots


def check_plan(plan: PagedPlan) -> None:
    """Raise a ValueError that names what no kernel here can take."""
    table, prefix, words = plan.block_table, plan.prefix_len, plan.words
    if table.dim() != 2 or table.stride(1) != 1 or table.dtype not in INTEGERS:
        raise ValueError(
            f"block_table: expected integers [B, P], rows contiguous, got {describe(table)}"
        )
    if prefix.shape != table.shape[:1] or prefix.dtype not in INTEGERS:
        raise ValueError(
            f"prefix_len: expected integers [{table.shape[0]}], got {describe(prefix)}"
        )
    if plan.page_size < 1 or plan.page_size & (plan.page_size - 1):
        raise ValueError(f"page_size: expected a power of two, got {plan.page_size}")
    for kind, window in plan.views:
        if kind not in KINDS or window < 0 or (kind == "tree" and window):
            raise ValueError(f"views: {kind!r} with a window of {window} is unknown")
        if kind == "tree":
            want = (table.shape[0], plan.num_tokens, -(-plan.num_tokens // 64))
            known = words is not None and words.shape == want and words.dtype == torch.int64
            if not known or (words is not None and words.stride(-1) != 1):
                raise ValueError(f'words: expected int64 {list(want)} for a "tree" view')
    if plan.num_tokens > table.shape[1] * plan.page_size:
        raise ValueError(
            f"block_table: {table.shape[1]} pages of {plan.page_size} have no room for "
            f"{plan.num_tokens} tokens"
        )
    # Rows times heads go to the second dimension of a grid.
    if table.shape[0] > 4096:
        raise ValueError(f"block_table: at most 4096 rows, got {table.shape[0]}")


def check_attention(q: Tensor, kv_layer: Tensor) -> None:
    """Raise a ValueError unless the attention kernel can take queries and keys of this kind."""
    if q.dim() != 4 or q.stride(3) != 1 or q.stride(2) != q.shape[3]:
        raise ValueError(f"q: expected [B, T, Hq, D] with contiguous heads, got {tuple(q.shape)}")
    dim = q.shape[3]
    if dim % 8 or not 16 <= dim <= 256:
        raise ValueError(f"q: expected a head size of 16, 24, ... 256, got {dim}")
    kv_heads = kv_layer.shape[2]
    if not kv_layer.is_contiguous() or kv_layer.shape[1:] != (2, kv_heads, dim):
        raise ValueError(f"kv_layer: expected contiguous [slots, 2, Hkv, {dim}]")
    if kv_layer.dtype != q.dtype or q.shape[2] % kv_heads:
        raise ValueError(f"kv_layer: {kv_heads} heads of {kv_layer.dtype} do not fit q's")
    if q.dtype not in FLOATS:
        raise ValueError(f"q: expected float32, float16 or bfloat16, got {q.dtype}")
    if q.device.type == "cpu" and q.dtype == torch.bfloat16:
        raise ValueError("q: Triton's interpreter does not compute in bfloat16")
