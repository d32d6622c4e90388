"""The variants of the attention and KV kernels that the supported models reach."""

from dataclasses import dataclass, field

from kernel_tools import compile_kernel

from ddtree.kernels import attention, kv_cache
from ddtree.kernels.paged_plan import (
    KINDS,
    Chip,
    choose_tile,
    merge_rows,
    power_of_two,
    tile_constants,
)

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}


@dataclass(frozen=True)
class Variant:
    """One kernel with its constants, but for what follows from the chip."""

    name: str
    kernel: str
    dtype: str = "bf16"
    rows: int = 0
    constants: dict = field(default_factory=dict)

    def __str__(self):
        return self.name


def attend(name, dtype, rows, dim, group, kv_heads, view="tree", split=True, page=16):
    """Attention in a tile for `rows` packed rows."""
    kind, _, window = view.partition("+")
    constants = {
        "KIND": KINDS[kind],
        "WINDOWED": bool(window),
        "SPLIT": split,
        "PAGE": page,
        "GROUP": group,
        "KV_HEADS": kv_heads,
        "DIM": dim,
    }
    shape = f"{rows}x{dim}-{group}over1-page{page}-{dtype}{'-splits' if split else ''}"
    return Variant(f"{name}-{view}-{shape}", "attention_kernel", dtype, rows, constants)


def merge(dtype, dim, group, kv_heads, splits):
    constants = {"GROUP": group, "KV_HEADS": kv_heads, "DIM": dim, "BLOCK_S": splits}
    return Variant(f"merge-{splits}x{dim}-{dtype}", "merge_kernel", dtype, 0, constants)


def rotate(dtype, dim, q_heads, kv_heads, norm):
    constants = {"NORM": norm, "Q_HEADS": q_heads, "KV_HEADS": kv_heads, "DIM": dim}
    name = f"rotate-{q_heads}+{kv_heads}x{dim}-{dtype}{'-norm' if norm else ''}"
    return Variant(name, "rotate_kernel", dtype, 0, constants)


def move(dtype, slot, rows):
    return Variant(
        f"move-{rows}-{dtype}", "move_kernel", dtype, rows, {"SLOT": slot, "BLOCK_R": rows}
    )


def write(dtype, slot):
    return Variant(f"write-{slot}-{dtype}", "write_kernel", dtype, 0, {"SLOT": slot})


MAIN = attend("verify", "bf16", 256, 128, 4, 8)
SMALL = [
    merge("bf16", 128, 4, 8, 8),
    rotate("bf16", 128, 32, 8, True),
    move("bf16", 2048, 16),
    write("bf16", 2048),
]
REST = [
    attend("decode", "bf16", 4, 128, 4, 8, "causal"),
    attend("draft", "bf16", 64, 128, 4, 8, "full"),
    attend("draft", "bf16", 64, 128, 4, 8, "causal+window"),
    attend("draft", "bf16", 32, 128, 2, 8, "full+window", page=64),
    attend("prefill", "bf16", 8192, 128, 4, 8, "causal", split=False),
    attend("prefill", "bf16", 8192, 128, 4, 8, "causal+window", split=False, page=256),
    attend("chain", "bf16", 128, 128, 8, 8, "causal", page=256),
    attend("verify", "bf16", 80, 128, 5, 8, page=1),
    attend("verify", "bf16", 64, 128, 1, 32, split=False),
    attend("verify", "fp16", 512, 128, 8, 1),
    attend("verify", "bf16", 448, 64, 7, 2),
    attend("prefill", "fp16", 6144, 64, 3, 3, "causal", split=False),
    attend("verify", "fp16", 64, 80, 1, 32),
    attend("verify", "bf16", 96, 96, 3, 8, page=32),
    attend("prefill", "bf16", 8192, 96, 1, 32, "causal", split=False),
    attend("verify", "bf16", 128, 256, 2, 4),
    attend("draft", "bf16", 16, 256, 1, 16, "full"),
    attend("prefill", "bf16", 4096, 256, 4, 4, "causal", split=False),
    attend("verify", "fp32", 64, 128, 4, 8),
    attend("prefill", "fp32", 6144, 64, 3, 3, "causal", split=False),
    attend("verify", "fp32", 64, 256, 4, 4),
    merge("fp32", 64, 3, 3, 32),
    merge("bf16", 256, 2, 4, 32),
    merge("bf16", 96, 3, 8, 4),
    merge("bf16", 256, 2, 4, 16),
    rotate("bf16", 64, 14, 2, False),
    rotate("bf16", 128, 0, 8, True),
    rotate("fp16", 80, 32, 32, False),
    rotate("fp32", 256, 8, 4, True),
    move("bf16", 2048, 128),
    move("bf16", 2048, 1024),
    move("fp32", 384, 16),
    write("fp32", 384),
]

POINTERS = {
    "attention_kernel": ("q", "kv", "out"),
    "merge_kernel": ("out",),
    "rotate_kernel": ("heads", "q_weight", "k_weight", "q_out", "kv"),
    "move_kernel": ("kv",),
    "write_kernel": ("kv", "out"),
}
OTHERS = {
    "attention_kernel": {
        **dict.fromkeys(("table", "prefix", "words"), "*i64"),
        "scale": "fp32",
        **dict.fromkeys(("window", "num_tokens", "q_row", "q_token", "table_row"), "i32"),
        **dict.fromkeys(("prefix_row", "words_row", "words_token"), "i32"),
    },
    "merge_kernel": {"partial": "*fp32", "levels": "*fp32", "num_tokens": "i32", "splits": "i32"},
    "rotate_kernel": {
        **dict.fromkeys(("row_stride", "token_stride", "layer_heads", "num_tokens"), "i32"),
        "slots_row": "i32",
        **dict.fromkeys(("cos", "sin"), "*fp32"),
        "eps": "fp32",
        "slots": "*i64",
        "layer_stride": "i64",
    },
    "move_kernel": {"source": "*i64", "target": "*i64", "count": "i32", "layer_stride": "i64"},
    "write_kernel": {
        **dict.fromkeys(("kv_row", "kv_token", "slots_row", "num_tokens"), "i32"),
        "slots": "*i64",
    },
}
SIXTEENS = ("q_row", "q_token", "row_stride", "token_stride", "layer_stride", "kv_row", "kv_token")


def compile_variant(variant, chip):
    """Compile for `chip` as the launchers launch it; returns the `Usage` and the launch's cut."""
    name, constants, options = variant.kernel, dict(variant.constants), {}
    pointer = f"*{variant.dtype}"
    signature = {**OTHERS[name], **dict.fromkeys(POINTERS[name], pointer)}
    if name == "attention_kernel":
        about = Chip(lean=chip in ("sm_80", "gfx942"), hip=chip == "gfx942")
        tile = choose_tile(variant.rows, constants["DIM"], BYTES[variant.dtype], about)
        constants |= tile_constants(tile, "tree" if constants["KIND"] == 2 else "")
        constants["BLOCK_D"] = power_of_two(constants["DIM"])
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
        part = "*fp32" if constants["SPLIT"] else pointer
        signature |= {"partial": part, "levels": part}
    elif name == "merge_kernel":
        constants["BLOCK_D"] = power_of_two(constants["DIM"])
        constants["BLOCK_R"] = merge_rows(constants["BLOCK_S"], constants["BLOCK_D"])
    elif name == "rotate_kernel":
        constants |= {"HALF": power_of_two(constants["DIM"] // 2)}
        constants["BLOCK_H"] = kv_cache.HEADS_PER_PROGRAM
    elif name == "move_kernel":
        constants["BLOCK_C"] = kv_cache.move_columns(constants["BLOCK_R"], constants["SLOT"])
        signature["kv"] = "*i16" if BYTES[variant.dtype] == 2 else "*i32"
    else:
        constants["BLOCK"] = min(power_of_two(constants["SLOT"]), kv_cache.WRITE_ELEMENTS)
    kernel = getattr(attention if name in ("attention_kernel", "merge_kernel") else kv_cache, name)
    sixteens = tuple(key for key in SIXTEENS if key in signature)
    usage = compile_kernel(kernel, chip, signature, constants, sixteens=sixteens, **options)
    return usage, {**options, **{k: v for k, v in constants.items() if k.startswith("BLOCK")}}
