"""The kernel sets: one object per backend, all with the same signatures."""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from ddtree.kernels.reference import TorchOps


def get_ops(name: str, device: torch.device) -> TorchOps:
    """Return the kernel set `name` for `device`.

    Args:
        name: ``"torch"``; ``"triton"``; or ``"auto"``: Triton on CUDA where it is installed,
            torch elsewhere.
        device: the device that the ops will run on.

    Raises:
        ValueError: the name is unknown, or its kernels cannot run here.
    """
    if name not in ("auto", "torch", "triton"):
        raise ValueError(f'kernels: expected "auto", "torch" or "triton", got {name!r}')
    installed = find_spec("triton") is not None
    if name == "torch" or (name == "auto" and not (device.type == "cuda" and installed)):
        return TorchOps(device)
    if not installed:
        raise ValueError('kernels: "triton" needs the package triton, which is not installed')
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            'kernels: "triton" needs a GPU, or TRITON_INTERPRET=1 set before Python starts; here '
            '"torch" is the choice'
        )
    from ddtree.kernels.fused import TritonOps

    return TritonOps(device)
