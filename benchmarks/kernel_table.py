"""Compiles every variant of the kernels for every chip; tables what each takes.

No GPU is needed. Registers are per thread, shared memory in bytes per program; a kernel that needs
memory of its own for what registers could not hold, or more shared memory than the chip has, is an
error.

    python benchmarks/kernel_table.py --output benchmarks/results/kernels.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import token_kernel_variants as token_kernels  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
from kernel_tools import CHIPS  # noqa: E402
from kernel_variants import MAIN, REST, SMALL, compile_variant  # noqa: E402


def main() -> None:
    """Compile, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--output", type=Path, help="JSON file for the table")
    args = parser.parse_args()
    table: dict[str, dict[str, Any]] = {}
    failed = []
    for variant in [MAIN, *SMALL, *REST, *token_kernels.SMALL, *token_kernels.REST]:
        for chip in args.chips:
            try:
                if isinstance(variant, token_kernels.Variant):
                    usage, cut = token_kernels.compile_variant(variant, chip), {}
                else:
                    usage, cut = compile_variant(variant, chip)
            except AssertionError as error:
                failed.append(f"{variant} on {chip}: {error}")
                print(f"FAILED {failed[-1]}", flush=True)
                continue
            row = {**vars(usage), **{name.lower(): value for name, value in cut.items()}}
            table.setdefault(str(variant), {})[chip] = row
            print(f"{variant!s:58} {chip:7} {usage}", flush=True)
            if args.output:
                versions = {"torch": torch.__version__, "triton": triton.__version__}
                args.output.write_text(json.dumps({**versions, "kernels": table}, indent=1) + "\n")
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
