"""flash-attn, where it is installed: it serves causal calls whose pages it can read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ddtree.kernels.paged_plan import PagedPlan

PAGE_MULTIPLE = 256
"""Page sizes that flash-attn 2 reads: multiples of this."""


def load(device: torch.device) -> tuple[Any, str]:
    """The function for paged keys, with the package's version; or None, and why not."""
    if device.type != "cuda":
        return None, "flash-attn needs a GPU"
    try:
        import flash_attn
    except ImportError as error:
        return None, f"flash-attn cannot be imported: {error}"
    function = getattr(flash_attn, "flash_attn_with_kvcache", None)
    if function is None:
        return None, "this flash-attn has no flash_attn_with_kvcache"
    return function, f"flash-attn {flash_attn.__version__}"


def refusal(page_size: int, dtype: torch.dtype, head_dim: int) -> str:
    """Why flash-attn cannot serve calls on such pages; "" where it can."""
    if page_size % PAGE_MULTIPLE:
        return f"flash-attn reads pages of {PAGE_MULTIPLE} tokens, not {page_size}"
    if dtype not in (torch.float16, torch.bfloat16):
        return f"flash-attn does not compute in {str(dtype).removeprefix('torch.')}"
    if head_dim > 256 or head_dim % 8:
        return f"flash-attn has no head size of {head_dim}"
    return ""


def attend(
    function: Any, q: Tensor, kv_layer: Tensor, plan: PagedPlan, window: int, scale: float
) -> Tensor:
    """Causal attention of `q [B, T, Hq, D]` through flash-attn's `function`, in place of ours."""
    if not plan.flash:
        lengths = (plan.prefix_len + plan.num_tokens).int()
        plan.flash.update(block_table=plan.block_table.int(), cache_seqlens=lengths)
    pages = kv_layer.unflatten(0, (-1, plan.page_size))
    k, v = pages.unbind(2)
    sides = (window - 1, 0) if window else (-1, -1)
    return function(q, k, v, **plan.flash, softmax_scale=scale, causal=True, window_size=sides)
