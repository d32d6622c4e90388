"""Replays decoder layers as recorded op sequences, where Python would cost too much."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ddtree.config import LayerConfig
from ddtree.kernels.reference import PACKED_ROWS_MAX, AttentionPlan, PackedLinear, TorchOps, View
from ddtree.models.layers import DecoderLayer, Linear, RMSNorm
from ddtree.state import StepState

Recording = Callable[..., Tensor]
MAX_RECORDINGS = 256
"""Shapes that recordings are kept for; further ones run eagerly."""
WORTH_RECORDING = 3
"""Forwards of a shape before it is recorded: prompts rarely have the same length twice."""


class TracedLayers:
    """Decoder layers with one recording per input shape, shared by all layers.

    The recording takes the layer's weights as inputs. On CPU, in float32, a small model's step
    spends a third of its time between the matmuls; replaying a recording halves that. Anything
    else (other devices, long prefill chunks, a torch without `torch.jit.trace`) runs the layer as
    it is: the ops and their order are the same.
    """

    def __init__(self, layers: Sequence[DecoderLayer], config: LayerConfig, ops: TorchOps):
        self.layers = layers
        self._group = config.num_heads // config.num_kv_heads
        self._template = DecoderLayer(config, ops)
        self._records = bool(ops.linear_library) and hasattr(torch.jit, "trace")
        self._recordings: dict[Any, Recording] = {}
        self._seen: Counter[Any] = Counter()
        self._weights: list[list[Tensor]] = []

    def begin(
        self, x: Tensor, cos: Tensor, sin: Tensor, state: StepState, view: View
    ) -> Callable[[int, Tensor, Tensor], Tensor]:
        """Prepare a forward of `x [B, T, H]` through layers that all look by `view`.

        Returns a function (layer index, x, kv_layer) -> x after that layer.
        """

        def eager(index: int, x: Tensor, kv_layer: Tensor) -> Tensor:
            return self.layers[index](x, cos, sin, state, kv_layer, view)

        if x.shape[1] > PACKED_ROWS_MAX or not self._records:
            return eager
        key = (x.shape, view)
        recording = self._recordings.get(key)
        bias = state.plan.bias(view, self._group, x.dtype)
        shared = (cos, sin, state.slots, state.plan.index, bias)
        if recording is None:
            self._seen[key] += 1
            if self._seen[key] < WORTH_RECORDING or len(self._recordings) == MAX_RECORDINGS:
                return eager
            self._weights = self._weights or [_tensors(layer) for layer in self.layers]

            def record(index: int, x: Tensor, kv_layer: Tensor) -> Tensor:
                if key not in self._recordings:
                    self._recordings[key] = self._record(index, view, (x, kv_layer, *shared))
                return self._recordings[key](x, kv_layer, *shared, *self._weights[index])

            return record
        weights = self._weights

        def replay(index: int, x: Tensor, kv_layer: Tensor) -> Tensor:
            return recording(x, kv_layer, *shared, *weights[index])

        return replay

    def _record(self, index: int, view: View, shared: tuple[Tensor, ...]) -> Recording:
        """Record a layer for the shape of `shared`; the recorder runs it once for that."""

        def run(
            x: Tensor,
            kv_layer: Tensor,
            cos: Tensor,
            sin: Tensor,
            slots: Tensor,
            keys: Tensor,
            bias: Tensor,
            *weights: Tensor,
        ) -> Tensor:
            _bind(self._template, self.layers[index], list(weights))
            plan = AttentionPlan(keys, {view: bias}, {(view, self._group): bias})
            return self._template(x, cos, sin, StepState(slots, slots, plan), kv_layer, view)

        with warnings.catch_warnings():
            # It is deprecated in favour of compilers that a plain machine does not have.
            warnings.simplefilter("ignore")
            example = (*shared, *self._weights[index])
            return torch.jit.trace(run, example, check_trace=False)


def _parts(layer: DecoderLayer) -> list[Linear | RMSNorm]:
    attention, mlp = layer.attention, layer.mlp
    parts: list[Linear | RMSNorm] = [layer.attention_norm, attention.qkv, attention.output]
    if attention.qk_norm:
        parts += [attention.q_norm, attention.k_norm]
    return [*parts, layer.mlp_norm, mlp.gate_up, mlp.down]


def _tensors(layer: DecoderLayer) -> list[Tensor]:
    """All tensors of a layer, in a fixed order."""
    tensors: list[Tensor] = []
    for part in _parts(layer):
        weight = part.weight
        # What follows the packed weight is only a shape, and can be recorded as a constant.
        tensors.append(weight.tensors[0] if isinstance(weight, PackedLinear) else weight)
        if isinstance(part, Linear) and part.bias is not None:
            tensors.append(part.bias)
    return tensors


def _bind(template: DecoderLayer, like: DecoderLayer, tensors: list[Tensor]) -> None:
    """Give `template` the `tensors` in place of those of `like`."""
    for part, model in zip(_parts(template), _parts(like), strict=True):
        weight = model.weight
        part.weight = tensors.pop(0)
        if isinstance(weight, PackedLinear):
            part.weight = replace(weight, tensors=(part.weight, *weight.tensors[1:]))
        if isinstance(part, Linear) and isinstance(model, Linear) and model.bias is not None:
            part.bias = tensors.pop(0)
