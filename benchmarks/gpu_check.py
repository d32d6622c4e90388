"""Checks on a GPU what a CPU cannot show: captured rounds, host waits, gaps, roofline, kernels.

Random weights of real shapes (Qwen3-8B and a 5-layer DFlash drafter, block 16) are made on the
device, nothing is downloaded. Without a GPU, or with --cpu, the same code runs on a small model,
capture emulated by the tests' recorder, and every GPU row says "not measured".

    python benchmarks/gpu_check.py --output benchmarks/results/gpu_check.json
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from check_kernels import NOT_MEASURED, device_ms, measure, unmeasured  # noqa: E402
from emulator import Emulator, KnownDrafter  # noqa: E402
from fixtures import TINY_TAPS, tiny_drafter, tiny_target  # noqa: E402
from kernel_trials import SMALL, Sizes  # noqa: E402
from stubs import FULL, PARTLY, _ranked_rows  # noqa: E402

from ddtree import SamplingParams  # noqa: E402
from ddtree.config import DraftConfig, ModelConfig, load_target_config  # noqa: E402
from ddtree.config.shapes import RopeConfig  # noqa: E402
from ddtree.kernels import get_ops  # noqa: E402
from ddtree.kernels.reference import TorchOps  # noqa: E402
from ddtree.models.dummy import dummy_models  # noqa: E402
from ddtree.models.qwen3 import Qwen3  # noqa: E402
from ddtree.models.registry import build_drafter, build_target  # noqa: E402
from ddtree.runtime import loop as loop_module  # noqa: E402
from ddtree.runtime.graphs import GraphKey  # noqa: E402
from ddtree.runtime.kv_cache import bytes_per_token  # noqa: E402
from ddtree.runtime.loop import Loop  # noqa: E402
from ddtree.runtime.pages import RESERVED_PAGES, pages_for  # noqa: E402
from ddtree.runtime.plan import DecodeSpec, round_up  # noqa: E402
from ddtree.runtime.request import FINISHED, RUNNING, Request  # noqa: E402
from ddtree.runtime.stats import StageTimer  # noqa: E402
from ddtree.runtime.step import decode_step  # noqa: E402

BLOCK, PAGE = 16, 16
GAP_US = 50.0
SECONDS = 420.0
"""When kernels are no longer begun: the whole takes less than eight minutes."""


def shapes(real: bool) -> tuple[ModelConfig, DraftConfig]:
    """Qwen3-8B and its published drafter, or something small of the same make."""
    layers, hidden, heads, kv_heads, dim, inner, vocab = (
        (36, 4096, 32, 8, 128, 12288, 151936) if real else (3, 64, 4, 2, 16, 96, 211)
    )
    common: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": dim,
        "rms_norm_eps": 1e-6,
        "rope": RopeConfig(theta=1e6),
        "max_position_embeddings": 40960,
        "attention_bias": False,
        "mlp_bias": False,
        "qk_norm": True,
        "torch_dtype": "bfloat16",
    }
    target = ModelConfig(
        **common,
        num_layers=layers,
        architecture="Qwen3ForCausalLM",
        vocab_size=vocab,
        tie_word_embeddings=False,
        eos_token_ids=(),
    )
    drafter_layers = 5 if real else 2
    draft = DraftConfig(
        **common,
        num_layers=drafter_layers,
        block_size=BLOCK,
        mask_token_id=vocab - 1,
        target_layer_ids=(1, 9, 17, 25, 33) if real else (0, 1, 2),
        layer_views=(("full", 0),) * drafter_layers,
    )
    return target, draft


class NoText:
    """A request's stream where there is no text."""

    match = None

    def push(self, ids: list[int]) -> tuple[str, None]:
        return "", None

    def finish(self) -> str:
        return ""


def make_loop(target: Any, drafter: Any, ops: Any, **options: Any) -> Loop:
    """The engine's inside around built models."""
    defaults: dict[str, Any] = {
        "device": ops.device,
        "budget": 63,
        "max_batch_size": 4,
        "max_model_len": 1024,
        "page_size": PAGE,
        "num_pages": None,
        "memory_fraction": 0.9,
        "prefill_chunk": 256,
        "cuda_graphs": True,
        "coupling": True,
        "rejection": False,
        "progress": iter,
    }
    return Loop.build(target, drafter, ops, **(defaults | options))


def serve(
    loop: Loop, prompts: list[list[int]], params: list[SamplingParams], budget: int = 63
) -> list[Request]:
    """Run all prompts to their ends; `budget` is the loop's own."""
    requests = [
        Request(i, prompt, one, len(prompt) + one.max_new_tokens, budget, (), NoText())
        for i, (prompt, one) in enumerate(zip(prompts, params, strict=True), start=1)
    ]
    for request in requests:
        loop.scheduler.check(request)
        loop.scheduler.add(request)
    while any(request.status != FINISHED for request in requests):
        loop.step()
    return requests


def some_prompts(count: int, vocab: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of mixed lengths."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(rng.randint(3, 40))] for _ in range(count)]


MODES: tuple[dict[str, Any], ...] = (
    {},
    {"budget": 7},
    {"speculation": "chain"},
    {},
    {"speculation": "off"},
)


def eagerly(loop: Loop, run: Callable[[], Any]) -> Any:
    """The same plans, padding included, without the graphs."""
    graphs, loop.runner.graphs = loop.runner.graphs, None
    try:
        return run()
    finally:
        loop.runner.graphs = graphs


def check_known(device: torch.device) -> dict[str, Any]:
    """A small model whose drafts are right: long accepted paths, captured against eager."""
    ops, folder = get_ops("torch", device), tiny_target()
    target = build_target(folder, ops, device, torch.float32)
    inner = build_drafter(tiny_drafter(), load_target_config(folder), ops, device, torch.float32)
    cpu = torch.device("cpu")
    rows = _ranked_rows(build_target(folder, get_ops("torch", cpu), cpu, torch.float32))
    prompts = some_prompts(10, 98)
    params = [SamplingParams(max_new_tokens=40, **MODES[i % len(MODES)]) for i in range(10)]
    options = {"max_model_len": 200, "budget": 16}
    off = [dataclasses.replace(p, speculation="off", budget=None) for p in params]
    plain = make_loop(target, None, ops, **(options | {"budget": 0}))
    answers = [r.output for r in serve(plain, prompts, off, 0)]
    known = [(len(p), p + a) for p, a in zip(prompts, answers, strict=True)]
    longest = 0
    for ranks in (FULL, PARTLY):
        loop = make_loop(target, KnownDrafter(target, inner, known, ranks, rows), ops, **options)
        captured = serve(loop, prompts, params, 16)
        eager = eagerly(loop, lambda loop=loop: serve(loop, prompts, params, 16))
        assert [r.output for r in captured] == [r.output for r in eager]
        # Rounding differs between rounds of other shapes: a near-tie may part from plain decoding.
        assert sum(r.output == answer for r, answer in zip(captured, answers, strict=True)) >= 8
        assert loop.runner.rounds["replayed"] > 0
        longest = max(longest, *(max(r.stats.acceptance_histogram) for r in captured))
    assert longest == inner.config.block_size, longest
    return {"taps": len(TINY_TAPS), "requests": 20, "longest_accepted": longest, "equal": True}


def check_equal(loop: Loop, vocab: int) -> dict[str, Any]:
    """Real shapes: captured rounds give the eager ones' tokens, bit for bit."""
    prompts = some_prompts(9, vocab, seed=1)
    params = [SamplingParams(max_new_tokens=24, **MODES[i % len(MODES)]) for i in range(9)]
    start = time.perf_counter()
    captured = serve(loop, prompts, params)
    seconds = time.perf_counter() - start
    start = time.perf_counter()
    eager = eagerly(loop, lambda: serve(loop, prompts, params))
    assert [r.output for r in captured] == [r.output for r in eager]
    return {
        "requests": 9,
        "equal": True,
        "rounds": dict(loop.runner.rounds),
        "captured_s": round(seconds, 2),
        "eager_s": round(time.perf_counter() - start, 2),
    }


def check_sync(loop: Loop, vocab: int) -> dict[str, Any]:
    """No call in the loop, prefill included, makes the host wait for the device."""
    prompts = some_prompts(6, vocab, seed=2)
    params = [SamplingParams(max_new_tokens=12, **MODES[i % len(MODES)]) for i in range(6)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        serve(loop, prompts, params)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"passed": True}


def check_gaps(loop: Loop, vocab: int) -> dict[str, Any]:
    """Idle time of the device between the kernels of steady rounds at batch 1."""
    (prompt,) = some_prompts(1, vocab, seed=3)
    params = SamplingParams(max_new_tokens=60)
    request = Request(1, prompt, params, len(prompt) + 60, 63, (), NoText())
    loop.scheduler.add(request)
    while request.status != RUNNING:
        loop.step()
    for _ in range(4):
        loop.step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        for _ in range(12):
            loop.step()
        torch.cuda.synchronize()
    while request.status != FINISHED:
        loop.step()
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in seen.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    gaps, busy_until = [], spans[0][1]
    for start, end in spans[1:]:
        gaps.append(start - busy_until)
        busy_until = max(busy_until, end)
    # The profiler's own start delays the first steps.
    gaps = gaps[len(gaps) // 4 :]
    return {
        "kernels": len(spans),
        "largest_gap_us": round(max(gaps), 1),
        f"gaps_over_{GAP_US:.0f}_us": sum(gap > GAP_US for gap in gaps),
    }


def round_bytes(target: ModelConfig, draft: DraftConfig, budget: int, context: int) -> int:
    """Bytes that a round has to read: all weights that it uses once, and the context's K/V."""

    def kv_shape(config: Any) -> tuple[int, int, int]:
        return config.num_layers, config.num_kv_heads, config.head_dim

    def layers(config: Any) -> int:
        widths = config.num_heads * 2 + config.num_kv_heads * 2
        attention = config.hidden_size * widths * config.head_dim
        return config.num_layers * (attention + 3 * config.hidden_size * config.intermediate_size)

    head = target.vocab_size * target.hidden_size
    weights, kv = layers(target) + head, bytes_per_token(kv_shape(target), torch.bfloat16)
    if budget:
        context_kv = 2 * draft.num_layers * draft.num_kv_heads * draft.head_dim
        projections = len(draft.target_layer_ids) * draft.hidden_size + context_kv
        weights += layers(draft) + head + projections * draft.hidden_size
        kv += bytes_per_token(kv_shape(draft), torch.bfloat16)
    return 2 * weights + context * kv


def roofline(
    loop: Loop, budgets: list[int], contexts: list[int], clock: Callable[[Callable], float]
) -> list[dict[str, Any]]:
    """Milliseconds of one round at batch 1, captured and eager."""
    runner = loop.runner
    rows, buckets = runner.rows, loop.scheduler.config.buckets
    slots = torch.zeros(1, dtype=torch.int64, device=runner.device)
    pages = rows.block_table.shape[1]
    rows.block_table[0] = torch.arange(pages, device=runner.device) + RESERVED_PAGES
    rows.limit[0] = 1 << 30
    rows.anchor[0] = 1
    table = []
    for budget in budgets:
        rows.budget[0] = budget
        nodes = round_up(budget + 1, buckets.nodes) if budget else 1
        spec = DecodeSpec("tree", nodes, BLOCK) if budget else DecodeSpec("off", 1, 1)
        for context in contexts:
            need = pages_for(context + 64 * BLOCK, PAGE)
            key = GraphKey(1, round_up(min(need, pages), buckets.widths), spec)
            rows.done[0] = False
            rows.length[0] = context
            assert runner.graphs is not None
            captured = None
            if key in runner.graphs:
                captured = clock(lambda key=key: runner.graphs.replay(key, slots))
            rows.length[0] = context

            def eager(key: GraphKey = key) -> Tensor:
                return decode_step(
                    runner.machine, rows, slots, key.table_width, key.spec, StageTimer(False)
                )

            table.append(
                {
                    "budget": budget,
                    "context": context,
                    "captured_ms": captured,
                    "eager_ms": clock(eager),
                }
            )
    rows.done[0] = True
    rows.length[0] = 0
    rows.block_table[0] = 0
    return table


@torch.inference_mode()
def host_ms(run: Callable[[], Any]) -> float:
    """Milliseconds of one call, by the host's clock."""
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second that a large copy moves, reads and writes counted."""
    source = torch.zeros(1 << 31, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / (1e-3 * device_ms(lambda: target.copy_(source)))


def main() -> None:
    """Run the checks and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu", action="store_true", help="smoke run on a small model")
    parser.add_argument("--budgets", type=int, nargs="+", default=[0, 15, 63, 127, 255])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 8192, 32768])
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    args = parser.parse_args()
    cpu = args.cpu or not torch.cuda.is_available()
    device = torch.device("cpu" if cpu else "cuda")
    if cpu:
        torch.set_num_threads(1)
        # Layers run as they are, and captures are emulated; kernels run in the interpreter.
        os.environ["TRITON_INTERPRET"] = "1"
        del torch.jit.trace
        TorchOps.sees_values = property(lambda ops: False, lambda ops, value: None)
        loop_module.make_recorder = lambda device: Emulator()
    result: dict[str, Any] = {
        "machine": "no GPU" if cpu else torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    begun = time.perf_counter()

    def note(name: str, value: Any) -> None:
        result[name] = value
        print(f"[{time.perf_counter() - begun:6.1f} s] {name}: {value}", flush=True)
        if args.output:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(result, indent=1) + "\n")

    known = check_known(device)
    note("captured_equals_eager_small", "emulated on CPU: equal" if cpu else known)
    ops = get_ops("auto", device)
    configs = shapes(real=not cpu)
    dtype = torch.float32 if cpu else torch.bfloat16
    target, drafter = dummy_models(*configs, Qwen3, ops, device, dtype)
    vocab = configs[0].vocab_size
    loop = make_loop(target, drafter, ops, num_pages=400)
    equal = check_equal(loop, vocab)
    note("captured_equals_eager", "emulated on CPU: equal" if cpu else equal)
    note("sync_debug_mode_error", NOT_MEASURED if cpu else check_sync(loop, vocab))
    note("gaps_between_rounds", NOT_MEASURED if cpu else check_gaps(loop, vocab))
    del loop
    contexts = [64, 300] if cpu else args.contexts
    budgets = [0, 15] if cpu else args.budgets
    room = max(contexts) + 1024
    started = time.perf_counter()
    loop = make_loop(
        target,
        drafter,
        ops,
        budget=max(budgets),
        max_batch_size=1,
        max_model_len=room,
        num_pages=pages_for(room + 512, PAGE),
    )
    capture = {"graphs": len(loop.runner.graphs or ()), "s": time.perf_counter() - started}
    note("captures", NOT_MEASURED if cpu else capture)
    table = roofline(loop, budgets, contexts, host_ms if cpu else device_ms)
    if cpu:
        table = [
            {"budget": b, "context": c, "captured_ms": NOT_MEASURED, "eager_ms": NOT_MEASURED}
            for b in args.budgets
            for c in args.contexts
        ]
    else:
        bandwidth = copy_bandwidth(device)
        note("copy_bandwidth_TB_per_s", round(bandwidth / 1e12, 3))
        for row in table:
            floor = 1e3 * round_bytes(*configs, row["budget"], row["context"]) / bandwidth
            row["roofline_ms"] = floor
            if row["captured_ms"]:
                row["share_of_roofline"] = floor / row["captured_ms"]
            for name, value in row.items():
                row[name] = round(value, 3) if isinstance(value, float) else value
    note("rounds", table)
    del loop, target, drafter
    left = SECONDS - (time.perf_counter() - begun)
    if cpu and importlib.util.find_spec("triton") is None:
        note("kernels", "not measured, and not run: triton is not installed")
        return
    kernels = measure(SMALL if cpu else Sizes(), device, dtype, left)
    note("kernels", unmeasured(Sizes()) if cpu else kernels)
    wrong = [row for row in kernels if "failed" in row or not row.get("within", True)]
    if wrong:
        raise SystemExit(f"{len(wrong)} kernels are wrong or do not run: {wrong}")


if __name__ == "__main__":
    main()
