"""Measures every kernel at the shapes of docs/kernels.md: error by float64, time beside torch's.

A part of gpu_check.py. Launches are captured, as rounds are. What a row reads is read again in
every repetition: tables of less than 50 MB come from an H200's L2 cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from kernel_bytes import BANDWIDTH, attention
from kernel_trials import Sizes, Trial
from token_trials import TokenTrials

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Row:
    """One row of the table: what is measured, and the time that the memory allows it at least."""

    kernel: str
    shape: str
    floor_us: float
    make: Callable[[], Trial]


def all_rows(trials: TokenTrials) -> Iterator[Row]:
    """All rows, in the order of the page."""
    sizes = trials.sizes
    verify, draft = sizes.target, sizes.draft
    for kind, shape, counts in (
        ("verify", verify, sizes.nodes),
        ("block", draft, (sizes.block,)),
    ):
        for tokens in counts:
            for context in sizes.contexts:
                yield Row(
                    f"attention, {kind}",
                    f"{tokens} tokens after {context}",
                    attention(shape, tokens, context).microseconds,
                    partial(trials.attention, kind, shape, tokens, context),
                )
    slot = {shape: 4 * shape.kv_heads * shape.dim for shape in (verify, draft)}
    for name, shape, tokens in (
        ("target", verify, sizes.verified),
        ("block", draft, sizes.block),
    ):
        size = 2 * (2 * shape.heads * shape.dim + slot[shape]) + 8 * shape.dim
        yield _row(
            f"rotate_and_write, {name}",
            f"{tokens} tokens, {shape.layers} layers",
            shape.layers * tokens * size,
            partial(trials.rotate, shape, tokens),
        )
    size = sizes.block * draft.layers * 2 * slot[draft]
    yield _row("write_context", f"{sizes.block} tokens", size, trials.write_context)
    size = 4 * verify.layers * 2 * slot[verify]
    yield _row("move_kv", f"4 rows, {verify.layers} layers", size, trials.move)
    for nodes in sizes.trees:
        size = nodes * (53 + 16 * -(-nodes // 64))
        yield _row("build_tree", f"{nodes} nodes", size, partial(trials.tree, nodes))
    depth, row = sizes.block - 1, 4 * sizes.vocab
    for count in sizes.candidates:
        make = partial(trials.candidates, count)
        yield _row("rank_candidates", f"K = {count}", depth * row, make)
    for nodes in sizes.nodes:
        for kind in ("argmax", "noise and argmax", "threshold of top-k and top-p"):
            make = partial(trials.choice, kind, nodes)
            yield _row(kind, f"{nodes} rows", nodes * row, make)
    layers, tokens = verify.layers, sizes.verified
    size = layers * tokens * 2 * 4 * sizes.hidden
    yield _row("add_rms_norm", f"{tokens} tokens, {layers} layers", size, trials.norm)
    size = layers * tokens * 2 * 3 * sizes.inner
    yield _row("silu_mul", f"{tokens} tokens, {layers} layers", size, trials.gate)


def _row(kernel: str, shape: str, size: float, make: Callable[[], Trial]) -> Row:
    return Row(kernel, shape, 1e6 * size / BANDWIDTH, make)


def errors(trial: Trial) -> dict[str, Any]:
    """The largest errors of the kernel and of torch; within: the former is at most twice the
    latter, and a rounding of the largest number."""
    ours, theirs, within = 0.0, 0.0, True
    for got, twin, exact in trial.check():
        error, own = ((x.double() - exact.to(x.device)).abs().max().item() for x in (got, twin))
        allowed = 2 * own + trial.slack
        if got.is_floating_point():
            allowed += torch.finfo(got.dtype).eps / 2 * exact.abs().max().item()
        within = within and error <= allowed
        ours, theirs = max(ours, error), max(theirs, own)
    return {"error": ours, "torch_error": theirs, "within": within}


@torch.inference_mode()
def device_ms(run: Callable[[], Any], warm: int = 2, repeats: int = 8) -> float:
    """Milliseconds per call, by the device's clock."""
    for _ in range(warm):
        run()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def captured_us(run: Callable[[], Any]) -> float:
    """Microseconds of a captured call, by the device's clock."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return 1e3 * device_ms(graph.replay)


@torch.inference_mode()
def measure(
    sizes: Sizes, device: torch.device, dtype: torch.dtype, seconds: float
) -> list[dict[str, Any]]:
    """The table: errors and microseconds of ours and torch's; only errors without a GPU.

    Rows that would begin after `seconds` are not measured. One that fails says why, and the rest
    goes on.
    """
    table, begun = [], time.perf_counter()
    for row in all_rows(TokenTrials(sizes, device, dtype)):
        line = describe(row)
        table.append(line)
        if time.perf_counter() - begun > seconds:
            line["us"] = NOT_MEASURED
            continue
        try:
            trial = row.make()
            line |= errors(trial)
            if device.type == "cuda":
                line["us"] = round(captured_us(trial.ours), 2)
                line["torch_us"] = round(captured_us(trial.torch), 2)
        except Exception as error:  # Triton's own errors are of no common kind.
            line["failed"] = f"{type(error).__name__}: {error}"[:300]
    return table


def describe(row: Row) -> dict[str, Any]:
    """What is known of a row before it is measured."""
    return {"kernel": row.kernel, "shape": row.shape, "floor_us": round(row.floor_us, 2)}


def unmeasured(sizes: Sizes) -> list[dict[str, Any]]:
    """The table's rows where there is no GPU to measure them."""
    empty = dict.fromkeys(("error", "torch_error", "us", "torch_us"), NOT_MEASURED)
    trials = TokenTrials(sizes, torch.device("meta"), torch.bfloat16)
    return [describe(row) | empty for row in all_rows(trials)]
