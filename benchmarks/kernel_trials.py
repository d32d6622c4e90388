"""What a benchmark of kernels runs and compares: attention, stores, norms and gates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from kernel_bytes import Shape
from torch import Tensor

from ddtree.kernels import get_ops
from ddtree.tree import build_tree
from ddtree.tree.build import Tree

PAGE, EPS, VIEWS = 16, 1e-6, {"verify": ("tree", 0), "block": ("full", 0)}
QWEN3_8B, DRAFTER = Shape(), Shape(layers=5)


@dataclass(frozen=True)
class Sizes:
    """A model and the rounds it is measured in; Qwen3-8B with block 16 unless told otherwise."""

    target: Shape = QWEN3_8B
    draft: Shape = DRAFTER
    hidden: int = 4096
    inner: int = 12288
    vocab: int = 151936
    contexts: tuple[int, ...] = (512, 8192, 32768)
    nodes: tuple[int, ...] = (1, 16, 64, 128, 256)
    trees: tuple[int, ...] = (16, 64, 128, 256, 512)
    candidates: tuple[int, ...] = (15, 63, 255)
    block: int = 16
    verified: int = 64


SMALL = Sizes(
    target=Shape(2, 4, 2, 16),
    draft=Shape(1, 4, 2, 16),
    hidden=32,
    inner=48,
    vocab=300,
    contexts=(20,),
    nodes=(6,),
    trees=(6,),
    candidates=(5,),
    block=4,
    verified=6,
)
"""For runs in Triton's interpreter, which show that the script works."""

Triple = tuple[Tensor, Tensor, Tensor]
"""What the kernel gives, what torch gives, and the truth in float64."""


@dataclass
class Trial:
    """One row of the table, with its tensors made."""

    ours: Callable[[], Any]
    torch: Callable[[], Any]
    check: Callable[[], list[Triple]]
    slack: float = 0.0
    """Error allowed on top of twice torch's own."""


class Trials:
    """Makes the trials of the kernels that models are made of."""

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype):
        self.sizes, self.device, self.dtype = sizes, device, dtype
        self.ops, self.plain = get_ops("triton", device), get_ops("torch", device)
        self.plain.sees_values = False

    def randn(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normal numbers on the device."""
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype)

    @cached_property
    def pool(self) -> tuple[Tensor, Tensor]:
        """K/V of all layers for the longest context, and a block table of shuffled pages."""
        shape = self.sizes.target
        pages = -(-(max(self.sizes.contexts) + max(self.sizes.nodes) + self.sizes.block) // PAGE)
        kv = self.randn(shape.layers, (pages + 2) * PAGE, 2, shape.kv_heads, shape.dim)
        kv[:, : 2 * PAGE] = 0
        return kv, torch.randperm(pages, device=self.device)[None] + 2

    def tree_inputs(self, nodes: int) -> tuple[tuple[Any, ...], Tree]:
        """Arguments of both builders, and torch's tree."""
        depth, width = self.sizes.block - 1, max(1, min(nodes - 1, self.sizes.vocab))
        weights = self.randn(1, depth, width, dtype=torch.float32).mul_(2).log_softmax(-1)
        weights = weights.sort(-1, descending=True).values
        ids = torch.arange(width, device=self.device).expand(1, depth, width).contiguous()
        anchor = torch.zeros(1, dtype=torch.int64, device=self.device)
        arguments = (anchor, ids, weights, nodes)
        return arguments, build_tree(*arguments)

    def attention(self, kind: str, shape: Shape, tokens: int, context: int) -> Trial:
        """All layers' attention; torch gathers the keys, then calls its SDPA."""
        (kv, table), view, scale = self.pool, VIEWS[kind], shape.dim**-0.5
        q = self.randn(1, tokens, shape.heads, shape.dim)
        words = None
        if kind == "verify":
            words = self.tree_inputs(tokens)[1].words
        length = torch.tensor([context], device=self.device)
        used = table[:, : -(-(context + tokens) // PAGE)]
        ours = self.ops.plan_attention(table, length, tokens, PAGE, (view,), words)
        theirs = self.plain.plan_attention(used, length, tokens, PAGE, (view,), words)

        def run(ops: Any, plan: Any) -> list[Tensor]:
            return [ops.attention(q, kv[i], plan, view, scale) for i in range(shape.layers)]

        def check() -> list[Triple]:
            slots = (used[0, :, None] * PAGE + torch.arange(PAGE, device=self.device)).view(-1)
            k, v = kv[0, slots[: context + tokens]].double().permute(1, 2, 0, 3)
            rows = q[0].double().unflatten(1, (shape.kv_heads, -1)).permute(1, 2, 0, 3)
            mask = torch.ones(tokens, context + tokens, dtype=torch.bool, device=self.device)
            if words is not None:
                node = torch.arange(tokens, device=self.device)
                mask[:, context:] = (words[0][:, node >> 6] >> (node & 63)) & 1 > 0
            scores = (rows @ k[:, None].mT * scale).masked_fill_(~mask, -torch.inf)
            exact = (scores.softmax(-1) @ v[:, None]).permute(2, 0, 1, 3).flatten(1, 2)[None]
            return [(run(self.ops, ours)[0], run(self.plain, theirs)[0], exact)]

        return Trial(lambda: run(self.ops, ours), lambda: run(self.plain, theirs), check)

    def rotate(self, shape: Shape, tokens: int) -> Trial:
        """Norms, rotation and stores of all layers."""
        heads = self.randn(shape.layers, 1, tokens, shape.heads + 2 * shape.kv_heads, shape.dim)
        cos, sin = self.randn(2, 1, tokens, 1, shape.dim, dtype=torch.float32)
        weights, kv = self.randn(2, shape.dim), self.pool[0]
        slots = torch.arange(2 * PAGE, 2 * PAGE + tokens, device=self.device)[None]

        def run(ops: Any, heads: Tensor) -> list[Tensor]:
            return [
                ops.rotate_and_write(heads[i], cos, sin, *weights, EPS, slots, kv[i])
                for i in range(shape.layers)
            ]

        def check() -> list[Triple]:
            fresh, found = heads.clone(), []
            for ops in (self.ops, self.plain):
                q = run(ops, fresh.clone())[0]
                found.append(torch.cat((q, kv[0, slots].flatten(2, 3)), 2))
            q, k, v = fresh[0].double().split((shape.heads, *[shape.kv_heads] * 2), 2)
            q, k = (_rotated(x, w, cos, sin) for x, w in zip((q, k), weights, strict=True))
            return [(*found, torch.cat((q, k, v), 2))]

        return Trial(lambda: run(self.ops, heads), lambda: run(self.plain, heads), check)

    def write_context(self) -> Trial:
        """Context rows of all layers."""
        shape, tokens = self.sizes.draft, self.sizes.block
        made = self.randn(1, tokens, shape.layers, 2, shape.kv_heads, shape.dim)
        cos, sin = self.randn(2, 1, tokens, 1, shape.dim, dtype=torch.float32)
        weights, kv = self.randn(shape.layers, shape.dim), self.pool[0][: shape.layers]
        slots = torch.arange(2 * PAGE, 2 * PAGE + tokens, device=self.device)[None]

        def run(ops: Any, made: Tensor) -> None:
            rows = made.permute(2, 0, 1, 3, 4, 5)
            ops.write_context(rows, cos, sin, weights, EPS, slots, kv)

        def check() -> list[Triple]:
            fresh, found = made.clone(), []
            for ops in (self.ops, self.plain):
                run(ops, fresh.clone())
                found.append(kv[:, slots[0]].transpose(0, 1)[None])
            exact = fresh.double()
            exact[..., 0, :, :] = _rotated(
                exact[..., 0, :, :], weights[:, None], cos[:, :, None], sin[:, :, None]
            )
            return [(*found, exact)]

        return Trial(lambda: run(self.ops, made), lambda: run(self.plain, made), check)

    def move(self) -> Trial:
        """A path's rows, one of which stays."""
        kv = self.pool[0]
        first = 2 * PAGE
        source = torch.tensor([1, 3, 4, 9, 11], device=self.device) + first
        target = torch.arange(1, 6, device=self.device) + first

        def check() -> list[Triple]:
            before, found = kv[:, first : first + 16].clone(), []
            for ops in (self.ops, self.plain):
                kv[:, first : first + 16] = before
                ops.move_kv(kv, source, target)
                found.append(kv[:, first : first + 16].clone())
            return [(*found, found[1].double())]

        return Trial(
            lambda: self.ops.move_kv(kv, source, target),
            lambda: self.plain.move_kv(kv, source, target),
            check,
        )

    def norm(self) -> Trial:
        """The addition and the norm behind each layer's attention."""
        x, residual = self.randn(2, 1, self.sizes.verified, self.sizes.hidden)
        weight, layers = self.randn(self.sizes.hidden), range(self.sizes.target.layers)

        def run(ops: Any) -> list[Any]:
            return [ops.add_rms_norm(x, residual, weight, EPS) for _ in layers]

        def check() -> list[Triple]:
            (total, ours), (_, theirs) = run(self.ops)[0], run(self.plain)[0]
            return [(ours, theirs, _normed(total.double(), weight))]

        return Trial(lambda: run(self.ops), lambda: run(self.plain), check)

    def gate(self) -> Trial:
        """SwiGLU's gate of all layers."""
        x, layers = (
            self.randn(1, self.sizes.verified, 2 * self.sizes.inner),
            self.sizes.target.layers,
        )

        def check() -> list[Triple]:
            gate, up = x.double().chunk(2, -1)
            return [(self.ops.silu_mul(x), self.plain.silu_mul(x), F.silu(gate) * up)]

        return Trial(
            lambda: [self.ops.silu_mul(x) for _ in range(layers)],
            lambda: [self.plain.silu_mul(x) for _ in range(layers)],
            check,
        )


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def _rotated(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x = _normed(x, weight)
    return x * cos.double() + x.roll(x.shape[-1] // 2, -1) * sin.double()
