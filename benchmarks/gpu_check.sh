#!/usr/bin/env bash
# Checks captured rounds on a GPU in less than eight minutes; without one, a smoke run on the CPU
# that reports "not measured". Results: benchmarks/results/gpu_check.json (or $1).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$([ -x .venv/bin/python ] && echo .venv/bin/python || echo python3)}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1
exec timeout 470 "$python" benchmarks/gpu_check.py --output "${1:-benchmarks/results/gpu_check.json}"
