"""Prints what the tree, sampling and elementwise kernels read and write in a round of Qwen3-8B.

Batch 1, 15 drafted depths, bfloat16 activations, float32 logits. A warp instruction takes one of
four issue slots of a multiprocessor; counts per logit are from the code for sm_90.

    python benchmarks/token_kernel_bytes.py
"""

from __future__ import annotations

LAYERS, HIDDEN, INNER, VOCAB, DEPTH = 36, 4096, 12288, 151936, 15
BANDWIDTH, ISSUE, CLOCK = 4.8e12, 132 * 4 * 1.98e9, 1.98e9
PART = 2048
CYCLES = {16: 102, 64: 107, 128: 139, 256: 213, 512: 357}
"""Instructions per node of the tree kernel, for each number of slots."""
WAIT = 200
"""Cycles that a node waits, about: five shuffles of the minimum, two loads, one barrier."""


def show(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |")


def us(size: float) -> str:
    return f"{1e6 * size / BANDWIDTH:.1f}"


def main() -> None:
    print("Tree\n")
    show("nodes", "KB", "cycles per node", "us")
    for nodes, slots in ((16, 16), (64, 64), (128, 128), (256, 256), (512, 512)):
        # A node: two weights and an id; five numbers, a flag and its words.
        size = nodes * (4 + 4 + 8 + 4 * 8 + 4 + 1 + 2 * 8 * -(-nodes // 64))
        cycles = CYCLES[slots] + WAIT
        show(nodes, f"{size / 1e3:.0f}", cycles, f"{1e6 * nodes * cycles / CLOCK:.0f}")

    print("\nVocabulary\n")
    show("kernel", "rows", "launches", "least MB", "moved MB", "us by bytes", "us by instructions")
    for count in (15, 63, 255):
        least = DEPTH * VOCAB * 4
        parts = -(-VOCAB // PART)
        moved = least + 2 * DEPTH * parts * count * 8
        # 103 per logit in line, 7 for each of 20 halvings.
        work = DEPTH * parts * PART * (103 + 7 * 20) / 32
        launches = 4 if parts > 8192 // count else 3
        row = (f"candidates, K = {count}", DEPTH, launches, f"{least / 1e6:.1f}")
        show(*row, f"{moved / 1e6:.1f}", us(moved), f"{1e6 * work / ISSUE:.0f}")
    for nodes in (1, 16, 64, 256):
        size = nodes * VOCAB * 4
        for name, passes, per_logit, launches in (
            ("argmax", 1, 10, 2),
            ("noise and argmax", 1, 91, 2),
            ("threshold of top-k and top-p", 17, 22, 1),
        ):
            work = passes * nodes * VOCAB * per_logit / 32
            if passes > 1:
                work *= max(1.0, 132 / nodes)  # a row has one multiprocessor
            row = (name, nodes, launches, f"{size / 1e6:.1f}", f"{passes * size / 1e6:.1f}")
            show(*row, us(size), f"{1e6 * work / ISSUE:.0f}")

    print("\nElementwise, all layers of a verify of 64 tokens\n")
    show("kernel", "launches", "MB", "us")
    tokens = 64
    for name, launches, numbers in (
        ("add, then norm", 2 * LAYERS, 5 * HIDDEN),
        ("`add_rms_norm`", LAYERS, 4 * HIDDEN),
        ("`silu_mul`", LAYERS, 3 * INNER),
        ("torch's silu, then product", 2 * LAYERS, 5 * INNER),
    ):
        size = LAYERS * tokens * numbers * 2
        show(name, launches, f"{size / 1e6:.0f}", us(size))


if __name__ == "__main__":
    main()
