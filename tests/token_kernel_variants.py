"""The variants of the tree, sampling, candidate and elementwise kernels that models reach."""

from dataclasses import dataclass
from itertools import combinations

from kernel_tools import compile_kernel

from ddtree.kernels import candidates, elementwise, filter_threshold, node_choice, tree_build

FLOATS = ("temperature", "top_p", "min_p", "thresholds", "alpha", "scale", "maxima", "sums")
LONGS = ("top_k", "seeds", "positions", "chosen", "packed", "ids", "tops", "best", "anchor")
TREE_LONGS = ("budget", "tokens", "parents", "depths", "ranks", "words")


@dataclass(frozen=True)
class Variant:
    """One kernel with its constants, warps, and the type of what it reads and writes."""

    name: str
    kernel: object
    warps: int
    constants: dict
    dtype: str = "fp32"

    def __str__(self):
        return self.name


def types_of(variant):
    """Triton's types of all arguments that are no constants, by name and kernel."""
    name = variant.kernel.function.__name__
    data = f"*{variant.dtype}"
    types = dict.fromkeys(("logits", "x", "residual", "total", "weight", "out", "gate_up"), data)
    types |= dict.fromkeys((*FLOATS, "cos", "sin", "weights", "scores"), "*fp32")
    types |= dict.fromkeys(LONGS, "*i64") | dict.fromkeys(("eps", "coldest"), "fp32")
    if name == "_tree_build":
        types |= dict.fromkeys(TREE_LONGS, "*i64") | {"valid": "*i1"}
    if name in ("_choose", "_join"):
        types["parts"] = "*i64"
    code = variant.kernel.function.__code__
    names = code.co_varnames[: code.co_argcount]
    return {n: types.get(n, "i32") for n in names if n not in variant.constants}


def compile_variant(variant, chip):
    """Compile it for one chip; see `kernel_tools.compile_kernel`."""
    return compile_kernel(
        variant.kernel, chip, types_of(variant), variant.constants, num_warps=variant.warps
    )


def tree(nodes, budget=True):
    constants = {"HAS_BUDGET": budget, "NODES": nodes, "WORDS": max(1, nodes // 64)}
    return Variant(f"tree-{nodes}", tree_build._tree_build, 1, constants)


def threshold(name, kinds, block=filter_threshold.BLOCK, warps=16, dtype="fp32"):
    constants = {kind: kind in kinds for kind in ("TOP_K", "TOP_P", "MIN_P")} | {"BLOCK": block}
    return Variant(f"threshold-{name}", filter_threshold._threshold, warps, constants, dtype)


def choose(name, kinds, dtype="fp32"):
    constants = {kind: kind in kinds for kind in ("FILTER", "NOISE")}
    constants["BLOCK"] = node_choice.BLOCK
    return Variant(f"choose-{name}", node_choice._choose, 16, constants, dtype)


def part(name, kinds, dtype="fp32"):
    constants = {kind: kind in kinds for kind in ("TEMPERED", "COUPLED")} | {"BLOCK": 2048}
    return Variant(f"part-{name}", candidates._part, 8, constants, dtype)


def rank(name, kinds, kept, warps):
    constants = {kind: kind in kinds for kind in ("TEMPERED", "COUPLED")}
    constants |= {"KEPT": kept, "PARTS": 128, "TILE": 16}
    return Variant(f"rank-{name}", candidates._rank, warps, constants)


def merge(size, warps):
    return Variant(f"merge-{size}", candidates._merge, warps, {"GROUP": size})


def norm(dtype, size, rows, warps, residual=False):
    constants = {"RESIDUAL": residual, "ROWS": rows, "SIZE": size}
    name = f"norm-{rows}x{size}-{dtype}{'-residual' if residual else ''}"
    return Variant(name, elementwise._rms_norm, warps, constants, dtype)


def gate(dtype):
    return Variant(f"gate-{dtype}", elementwise._silu_mul, 4, {"SIZE": 1024}, dtype)


def rotation(dtype, heads, half):
    constants = {"HEADS": heads, "HALF": half}
    warps = max(1, heads * half // 256)
    return Variant(f"rope-{heads}x{2 * half}-{dtype}", elementwise._rope, warps, constants, dtype)


FILTERS = ("TOP_K", "TOP_P", "MIN_P")
SMALL = [
    tree(64),
    threshold("all", FILTERS),
    choose("filtered", ("FILTER", "NOISE")),
    Variant("join-64", node_choice._join, 1, {"SPLITS": 64}),
    part("coupled", ("COUPLED",)),
    merge(8192, 8),
    rank("64-coupled", ("COUPLED",), 64, 2),
    norm("bf16", 4096, 1, 16, residual=True),
    gate("bf16"),
    rotation("bf16", 16, 64),
]
"""One of each kernel."""
REST = [
    *(tree(nodes) for nodes in (4, 16, 128, 256, 512)),
    *(
        threshold("+".join(kinds).lower(), kinds)
        for count in (1, 2)
        for kinds in combinations(FILTERS, count)
    ),
    threshold("small", FILTERS, 256, 2),
    threshold("bf16", FILTERS, dtype="bf16"),
    choose("greedy", ()),
    choose("greedy-bf16", (), "bf16"),
    choose("noise", ("NOISE",)),
    choose("filter", ("FILTER",)),
    part("plain", ()),
    part("plain-bf16", (), "bf16"),
    part("tempered", ("TEMPERED",)),
    merge(1024, 4),
    rank("512-coupled", ("COUPLED",), 512, 16),
    rank("16-tempered", ("TEMPERED",), 16, 1),
    rank("64-plain", (), 64, 2),
    *(
        variant
        for dtype in ("fp32", "fp16", "bf16")
        for variant in (
            norm(dtype, 64, 16, 4),
            norm(dtype, 128, 8, 4),
            norm(dtype, 1024, 1, 4),
            norm(dtype, 8192, 1, 16),
            norm(dtype, 8192, 1, 16, residual=True),
            gate(dtype),
            rotation(dtype, 32, 32),
            rotation(dtype, 8, 128),
            rotation(dtype, 1, 64),
        )
        if str(variant) not in map(str, SMALL)
    ),
]
