"""Weights in the blocked layouts of CPU libraries, for products of few rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor

HALF_EXPONENTS = (0, 12)
"""Powers of two by which a weight is tried to be scaled so that float16 holds it exactly."""
ROWS = 4096
"""Weight rows that are looked at at once."""
LEAST_INT8 = 1 << 18
"""Drafting weights of fewer numbers stay as exact as others."""
OBJECTS = {"fbgemm": "quantized::linear_dynamic_fp16", "int8": "quantized::linear_dynamic"}
"""The libraries whose packed weights are no tensors, and their ops."""


@dataclass
class PackedLinear:
    """A weight `[O, I]` in a CPU library's blocked layout.

    A token's logits should not depend on how many other tokens are verified beside it. `F.linear`
    changes its summation with the number of rows; FBGEMM's linear computes every row alike, and
    those of MKL and oneDNN do so for several rows, but at some sizes not for a single one.
    """

    library: str
    """``"fbgemm"``, ``"mkl"`` or ``"mkldnn"`` (oneDNN). FBGEMM's weights are in float16,
    which halves what a product reads. It computes in float32, and takes only what loses nothing.
    ``"int8"``, for drafts, is FBGEMM's, too: it halves that again, rounds weights and activations
    to 8 bits (with a scale per weight row, and one per product), and is not exact."""
    shape: tuple[int, int]
    tensors: tuple[Any, ...]
    """The packed weight; for MKL also a view of the plain one's shape, never read. FBGEMM's is no
    tensor but an object of torch's; while it is recorded, a tensor takes its place (`record`)."""
    exponent: int = 0
    """The packed weight is the weight times 2 to this."""

    def product(self, x: Tensor) -> Tensor:
        """`x [..., I]` -> `[..., O]`."""
        if self.library == "mkl":
            rows = x.numel() // self.shape[1]
            return torch.ops.mkl._mkl_linear.default(x, *self.tensors, None, rows)
        if self.library == "mkldnn":
            return torch.ops.mkldnn._linear_pointwise.default(
                x, *self.tensors, None, "none", [], ""
            )
        packed = self.tensors[0]
        if self.library == "int8":
            x = x.nan_to_num(0.0)  # a scale that is no number is an error
        if isinstance(packed, Tensor):
            product = torch.nn.functional.linear(x, packed)
        elif self.library == "int8":
            product = torch.ops.quantized.linear_dynamic.default(x, packed, True)
        else:
            product = torch.ops.quantized.linear_dynamic_fp16.default(x, packed)
        return product.mul_(2.0**-self.exponent) if self.exponent else product

    def bind(self, packed: Tensor) -> PackedLinear:
        """The same with another packed weight, or with what stands for it in a recording."""
        return replace(self, tensors=(packed, *self.tensors[1:]))

    def stand_in(self) -> Tensor:
        """A tensor to record with: of no use but for its shape where the weight is no tensor."""
        packed = self.tensors[0]
        if isinstance(packed, Tensor):
            return packed
        return torch.zeros(1, dtype=torch.float32, device="cpu").expand(self.shape)


class Packer:
    """Lays weights out for the first library that works on `device` and can hold them exactly."""

    def __init__(self, device: torch.device):
        self.libraries = packed_libraries(device)
        self.in_use: set[str] = set()
        """The libraries of the weights packed so far; ``"torch"`` for those given back."""

    def copies(self, weight: Tensor) -> bool:
        """Whether such a weight is packed: float32 on CPU only."""
        cpu = weight.device.type == "cpu"
        return cpu and weight.dtype == torch.float32 and bool(self.libraries)

    def __call__(self, weight: Tensor, drafts: bool = False) -> PackedLinear | Tensor:
        """Pack a `weight [O, I]`; one that no library takes is given back.

        drafts: it need not be exact.
        """
        libraries = self.libraries if self.copies(weight) else ()
        if libraries and drafts and weight.numel() >= LEAST_INT8 and _works("int8"):
            libraries = ("int8",)
        for library in libraries:
            packed = _PACK[library](weight.contiguous())
            if packed is not None:
                self.in_use.add(library)
                return packed
        self.in_use.add("torch")
        return weight


def packed_libraries(device: torch.device) -> tuple[str, ...]:
    """Name the CPU libraries whose prepacked linears work here, best first: FBGEMM for weights that
    float16 holds, and MKL or oneDNN for all others. Without one of these nothing is packed."""
    if device.type != "cpu":
        return ()
    general = [library for library in ("mkl", "mkldnn") if _works(library)][:1]
    return ("fbgemm", *general) if general and _works("fbgemm") else tuple(general)


@cache
def _works(library: str) -> bool:
    weight = torch.arange(12, dtype=torch.float32, device="cpu").view(3, 4)
    try:
        packed = _PACK[library](weight)
        right = packed is not None and _near(packed, packed.product(weight), weight)
        if packed is None or not right or library not in OBJECTS:
            return right
        # Its recordings are rewritten, which a future torch may not allow.
        recording = record(lambda x, w: (packed.bind(w).product(x),), [weight], [packed])
        return _near(packed, recording(weight, packed.tensors[0])[0], weight)
    except (RuntimeError, AttributeError, TypeError):
        return False


def _near(packed: PackedLinear, product: Tensor, weight: Tensor) -> bool:
    """Whether that is the product of `weight` with itself, as far as its library goes."""
    want = weight @ weight.T
    close = 0.02 * float(want.abs().max()) if packed.library == "int8" else 0.0
    return bool(((product - want).abs() <= close).all())


def quantise(weight: Tensor) -> Any:
    """A `weight [O, I]` in 8 bits with a scale per row, for torch's `quantized.linear_dynamic`.

    Raises:
        RuntimeError: torch has no such linear here.
    """
    scales = weight.abs().amax(1).clamp_min_(1e-12) / 127
    levels = torch.empty_like(weight, dtype=torch.int8)
    for start in range(0, len(weight), ROWS):
        rows = slice(start, start + ROWS)
        levels[rows] = (weight[rows] / scales[rows, None]).round_().to(torch.int8)
    zeros = torch.zeros(len(weight), dtype=torch.int64)
    before = torch.backends.quantized.engine
    try:
        torch.backends.quantized.engine = "x86"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole = torch._make_per_channel_quantized_tensor(levels, scales.double(), zeros, 0)
        return torch.ops.quantized.linear_prepack(whole, None)
    finally:
        torch.backends.quantized.engine = before


def _pack_int8(weight: Tensor) -> PackedLinear:
    return PackedLinear("int8", (weight.shape[0], weight.shape[1]), (quantise(weight),))


def _pack_fbgemm(weight: Tensor) -> PackedLinear | None:
    # float16 holds every weight of a float16 checkpoint, and nearly every one of a bfloat16
    # checkpoint: scaled, all numbers of 8 bits from 2e-9 to 16 are exact.
    for exponent in HALF_EXPONENTS:
        scaled = weight * 2.0**exponent if exponent else weight
        if all(map(_fits_half, scaled.split(ROWS))):
            break
    else:
        return None
    before = torch.backends.quantized.engine
    try:
        torch.backends.quantized.engine = "x86"
        packed = torch.ops.quantized.linear_prepack_fp16(scaled, None)
    finally:
        torch.backends.quantized.engine = before
    return PackedLinear("fbgemm", (weight.shape[0], weight.shape[1]), (packed,), exponent)


def _fits_half(weight: Tensor) -> bool:
    half = weight.half()
    return torch.equal(half.float(), weight) and bool(half.isfinite().all())


def _pack_mkl(weight: Tensor) -> PackedLinear:
    # Laid out for 64 rows it is no slower at one, and at 17 to 64 a quarter faster than for 16.
    data = torch.ops.mkl._mkl_reorder_linear_weight(weight, 64)
    shape = (weight.shape[0], weight.shape[1])
    return PackedLinear("mkl", shape, (data, weight.new_zeros(1).expand(shape)))


def _pack_mkldnn(weight: Tensor) -> PackedLinear:
    data = torch.ops.mkldnn._reorder_linear_weight(weight, 16)
    return PackedLinear("mkldnn", (weight.shape[0], weight.shape[1]), (data,))


_PACK: dict[str, Callable[[Tensor], PackedLinear | None]] = {
    "fbgemm": _pack_fbgemm,
    "int8": _pack_int8,
    "mkl": _pack_mkl,
    "mkldnn": _pack_mkldnn,
}


def record(
    run: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
    weights: Sequence[PackedLinear | Tensor],
) -> Callable[..., tuple[Tensor, ...]]:
    """Record the ops of `run(*inputs, *weights)`, which it runs once for that.

    The recorder takes tensors only. So FBGEMM's weights (`OBJECTS`) are recorded as plain linears
    of stand-ins, what that run computes is of no use, and the recording gets the right type and op
    afterwards.

    Returns:
        The same function of the inputs and of the weights' `tensors[0]`.
    """
    stand_ins = [w.stand_in() if isinstance(w, PackedLinear) else w for w in weights]
    with warnings.catch_warnings():
        # It is deprecated in favour of compilers that a plain machine does not have.
        warnings.simplefilter("ignore")
        recording = torch.jit.trace(run, (*inputs, *stand_ins), check_trace=False)
    if not any(map(_is_object, weights)):
        return recording
    graph = recording.graph
    for place, weight in zip(list(graph.inputs())[len(inputs) :], weights, strict=True):
        if not _is_object(weight):
            continue
        place.setType(weight.tensors[0]._type())
        for linear in [use.user for use in place.uses()]:
            if linear.kind() != "aten::linear":
                raise RuntimeError(f"a packed weight is used by {linear.kind()}")
            given = list(linear.inputs())[:2]
            if weight.library == "int8":
                with graph.insert_point_guard(linear):
                    given.append(graph.insertConstant(True))
            product = graph.create(OBJECTS[weight.library], given, 1)
            product.insertBefore(linear)
            product.output().setType(linear.output().type())
            linear.output().replaceAllUsesWith(product.output())
            linear.destroy()
    return torch._C._create_function_from_graph("recording", graph)


def _is_object(weight: PackedLinear | Tensor) -> TypeGuard[PackedLinear]:
    return isinstance(weight, PackedLinear) and weight.library in OBJECTS
