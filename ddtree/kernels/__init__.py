"""The kernel sets: one object per backend, all with the same signatures."""

from __future__ import annotations

import torch

from ddtree.kernels.reference import TorchOps


def get_ops(name: str, device: torch.device) -> TorchOps:
    """Return the kernel set `name` for `device`.

    Args:
        name: ``"torch"``, or ``"auto"`` (the torch ops; faster sets are chosen here once built).
        device: the device that the ops will run on.

    Raises:
        ValueError: the name is unknown, or its kernels are not part of this version.
    """
    if name in ("auto", "torch"):
        return TorchOps(device)
    if name == "triton":
        raise ValueError('kernels: "triton" is not supported yet; use "auto" or "torch"')
    raise ValueError(f'kernels: expected "auto", "torch" or "triton", got {name!r}')
