"""Replays decoder layers as recorded op sequences, where Python would cost too much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ddtree.config import LayerConfig
from ddtree.kernels.packed_linear import PackedLinear, record
from ddtree.kernels.reference import PACKED_ROWS_MAX, AttentionPlan, TorchOps, View
from ddtree.models.layers import DecoderLayer, Linear, RMSNorm
from ddtree.parallel import SINGLE, Parallel
from ddtree.state import StepState

Recording = Callable[..., tuple[Tensor, ...]]
Key = tuple[torch.Size, tuple[View, ...], tuple[bool, ...], bool, tuple[tuple[str, int], ...]]
"""Shape of the stream, views, which of them have a mask, whether keys are gathered, and how each
weight is packed."""
MAX_RECORDINGS = 256
"""Shapes that recordings are kept for; further ones run eagerly."""
MAX_GROUP = 6
"""Most layers in one recording."""
WORTH_RECORDING = 3
"""Forwards of a shape before it is recorded: prompts rarely have the same length twice."""


class TracedLayers:
    """Decoder layers, run in groups of which one recording per input shape is kept.

    The recording takes a group's weights as inputs, so all groups share it. On CPU, in float32, a
    small model's step spends a third of its time between the matmuls; replaying halves that.
    Anything else (other devices, several ranks, long prefill chunks, no `torch.jit.trace`) runs
    the layers as they are: the ops and their order are the same.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        config: LayerConfig,
        ops: TorchOps,
        parallel: Parallel = SINGLE,
    ):
        self.layers, self._ops = layers, ops
        self._group = layers[0].attention.heads // layers[0].attention.kv_heads
        count = len(layers)
        self._size = max(size for size in range(1, MAX_GROUP + 1) if count % size == 0)
        self._templates = [DecoderLayer(config, ops) for _ in range(self._size)]
        # A recording cannot hold what ranks say to each other.
        alone = parallel.size == 1
        self._records = alone and bool(ops.packer.libraries) and hasattr(torch.jit, "trace")
        self._recordings: dict[Any, Recording] = {}
        self._seen: Counter[Any] = Counter()
        self._weights: list[list[Any]] = []
        self._packings: list[tuple[tuple[str, int], ...]] = []

    def run(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        state: StepState,
        kv: Tensor,
        views: tuple[View, ...],
        taps: tuple[int, ...] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """Run all layers on the residual stream `x [B, T, H]`.

        Args:
            kv: [layers, slots, 2, Hkv, D].
            views: one per layer.
            taps: layers after which the stream is wanted, too.

        Returns:
            The stream after the last layer, and after each of `taps`.
        """
        tapped = {}
        kv, slots = state.plan.narrow(kv, state.slots)
        plan = state.plan
        if not self._worth_replaying(x, plan, views):
            state = replace(state, slots=slots)
            for index, layer in enumerate(self.layers):
                x = layer(x, cos, sin, state, kv[index], views[index])
                if index in taps:
                    tapped[index] = x
            return x, [tapped[index] for index in taps]
        tile = self._ops.tile_heads(x.shape[1], self._group)
        bias = {view: plan.bias(view, tile, x.dtype) for view in set(views)}
        keys = () if plan.index is None else (plan.index,)
        for number, start in enumerate(range(0, len(self.layers), self._size)):
            group = slice(start, start + self._size)
            masks = (bias[view] for view in views[group])
            inputs = (x, kv[group], cos, sin, slots, *keys)
            inputs = (*inputs, *(mask for mask in masks if mask is not None))
            key = _key(x, plan, views[group], self._packings[number])
            recording = self._recordings.get(key)
            if recording is None:
                recording = self._recordings[key] = self._record(start, key, inputs)
            streams = recording(*inputs, *self._weights[number])
            x = streams[-1]
            for index in taps:
                if start <= index < start + self._size:
                    tapped[index] = streams[index - start]
        return x, [tapped[index] for index in taps]

    def _worth_replaying(self, x: Tensor, plan: AttentionPlan, views: tuple[View, ...]) -> bool:
        if x.shape[1] > PACKED_ROWS_MAX or not self._records:
            return False
        if not self._weights:
            for start in range(0, len(self.layers), self._size):
                group = self.layers[start : start + self._size]
                weights = [weight for layer in group for weight in _weights(layer)]
                self._packings.append(tuple(map(_packing, weights)))
                self._weights.append([_plain(weight) for weight in weights])
        if _key(x, plan, views[: self._size], self._packings[0]) in self._recordings:
            return True
        self._seen[x.shape] += 1
        return self._seen[x.shape] >= WORTH_RECORDING and len(self._recordings) < MAX_RECORDINGS

    def _record(self, start: int, key: Key, inputs: tuple[Tensor, ...]) -> Recording:
        """Record the group of layers from `start` on, run once for that with whatever weights."""
        shape, views, masked, gathers, _ = key
        tile = self._ops.tile_heads(shape[1], self._group)

        def run(
            x: Tensor, kv: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, *others: Tensor
        ) -> tuple[Tensor, ...]:
            rest = list(others)
            keys = rest.pop(0) if gathers else None
            masks = [rest.pop(0) if has else None for has in masked]
            streams = []
            for offset, template in enumerate(self._templates):
                view, bias = views[offset], masks[offset]
                _bind(template, self.layers[start + offset], rest)
                plan = AttentionPlan(keys, {view: bias}, {(view, tile): bias})
                x = template(x, cos, sin, StepState(slots, slots, plan), kv[offset], view)
                streams.append(x)
            return tuple(streams)

        layers = self.layers[start : start + self._size]
        return record(run, inputs, [weight for layer in layers for weight in _weights(layer)])


def _key(
    x: Tensor, plan: AttentionPlan, views: tuple[View, ...], packings: tuple[tuple[str, int], ...]
) -> Key:
    masked = tuple(plan.masks[view] is not None for view in views)
    return x.shape, views, masked, plan.index is not None, packings


def _parts(layer: DecoderLayer) -> list[Linear | RMSNorm]:
    attention, mlp = layer.attention, layer.mlp
    parts: list[Linear | RMSNorm] = [layer.attention_norm, attention.qkv, attention.output]
    if attention.qk_norm:
        parts += [attention.q_norm, attention.k_norm]
    return [*parts, layer.mlp_norm, mlp.gate_up, mlp.down]


def _weights(layer: DecoderLayer) -> list[Tensor | PackedLinear]:
    """All weights and biases of a layer, in a fixed order."""
    weights: list[Tensor | PackedLinear] = []
    for part in _parts(layer):
        weights.append(part.weight)
        if isinstance(part, Linear) and part.bias is not None:
            weights.append(part.bias)
    return weights


def _packing(weight: Tensor | PackedLinear) -> tuple[str, int]:
    """What of a weight a recording depends on."""
    return (weight.library, weight.exponent) if isinstance(weight, PackedLinear) else ("", 0)


def _plain(weight: Tensor | PackedLinear) -> Any:
    # What follows the packed weight is only a shape, and can be recorded as a constant.
    return weight.tensors[0] if isinstance(weight, PackedLinear) else weight


def _bind(template: DecoderLayer, like: DecoderLayer, tensors: list[Tensor]) -> None:
    """Give `template` the `tensors` in place of those of `like`."""
    for part, model in zip(_parts(template), _parts(like), strict=True):
        weight = model.weight
        part.weight = tensors.pop(0)
        if isinstance(weight, PackedLinear):
            part.weight = weight.bind(part.weight)
        if isinstance(part, Linear) and isinstance(model, Linear) and model.bias is not None:
            part.bias = tensors.pop(0)
