"""Runs kernels without a GPU: in Triton's interpreter, and through the compiler of every chip.

Both happen in processes of their own, since TRITON_INTERPRET acts when a kernel is decorated.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import re
import subprocess
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

INTERPRET = "TRITON_INTERPRET"
CHIPS = {
    "sm_80": (("cuda", 80, 32), 163 << 10),
    "sm_90": (("cuda", 90, 32), 227 << 10),
    "sm_100": (("cuda", 100, 32), 227 << 10),
    "gfx942": (("hip", "gfx942", 64), 64 << 10),
}
"""Triton's name for each chip, and the bytes of shared memory that a program may have there."""


@functools.cache
def _process(**environment: str) -> ProcessPoolExecutor:
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        pool.submit(torch.set_num_threads, 1).result()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    return pool


def interpreted(test: Callable[..., None]) -> Callable[..., None]:
    """Decorate a test whose kernels are to run in the interpreter.

    All such tests share one process; their parameters are pickled, fixtures included.
    """

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        if os.environ.get(INTERPRET) == "1":
            test(*args, **kwargs)
        else:
            _process(**{INTERPRET: "1"}).submit(run, *args, **kwargs).result()

    return run


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel takes of a chip."""

    registers: int
    """Per thread; on AMD the vector registers."""
    shared: int
    """Bytes per program."""
    stack: int
    """Bytes per thread outside of registers: stack, local memory, scratch."""
    spills: int
    """Vector registers spilled, on AMD; on NVIDIA they show as stack. Scalar ones that spill go to
    lanes of a vector register there, and show as stack only where they don't."""


def compile_kernel(
    kernel: Any,
    chip: str,
    signature: Mapping[str, str],
    constants: Mapping[str, Any],
    unaligned: tuple[str, ...] = (),
    sixteens: tuple[str, ...] = (),
    **options: Any,
) -> Usage:
    """Compile for one of `CHIPS`, check what has to hold for every kernel, return the rest.

    kernel:    a `ddtree.kernels.lazy.Kernel` at the top level of its module.
    signature: triton type ("*fp32", "i64") of each argument that is no constexpr, in any order.
    constants: values of the constexpr arguments.
    unaligned: pointers that are not multiples of 16 bytes; all others are taken to be.
    sixteens:  integers that are multiples of 16, which triton compiles for, too.
    options:   num_warps, num_stages.
    """
    function = kernel.function
    task = (function.__module__, function.__name__, chip)
    arguments = (dict(signature), dict(constants), unaligned, sixteens, options)
    environment = {"TRITON_DEFAULT_FP_FUSION": "1"}
    usage = _process(**environment).submit(_compile, *task, *arguments).result()
    assert usage.stack == 0 and usage.spills == 0, usage
    assert usage.shared <= CHIPS[chip][1], usage
    return usage


def _compile(
    module: str,
    name: str,
    chip: str,
    signature: dict[str, str],
    constants: dict[str, Any],
    unaligned: tuple[str, ...],
    sixteens: tuple[str, ...],
    options: dict[str, Any],
) -> Usage:
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    found = getattr(importlib.import_module(module), name)
    function = getattr(found, "jit", lambda: found)()
    names = list(function.arg_names)
    assert {*signature, *constants} == set(names), {*signature, *constants} ^ set(names)
    types = {n: signature.get(n, "constexpr") for n in names}
    aligned = [n for n, t in types.items() if t.startswith("*") and n not in unaligned]
    aligned += sixteens
    attributes = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(function, types, constants, attributes)
    made = triton.compile(source, target=GPUTarget(*CHIPS[chip][0]), options=options)
    shared = made.metadata.shared
    if "amdgcn" in made.asm:
        text = made.asm["amdgcn"]
        vgprs, stack, spills = (
            sum(map(int, re.findall(rf"\.{key}:\s*(\d+)", text)))
            for key in (
                "vgpr_count",
                "private_segment_fixed_size",
                "vgpr_spill_count",
            )
        )
        assert "private_segment_fixed_size" in text
        return Usage(vgprs, shared, stack, spills)
    return _cuda_usage(made.asm["cubin"], shared)


def _cuda_usage(cubin: bytes, shared: int) -> Usage:
    import tempfile

    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    assert found, text
    registers, stack, _, local = map(int, found.groups())
    return Usage(registers, shared, stack + local, 0)
