"""The Triton kernel set: the ops of `TorchOps`, each as few launches as it can be."""

from __future__ import annotations

import torch

from ddtree.kernels.reference import TorchOps


class TritonOps(TorchOps):
    """Shapes and meanings are `TorchOps`'s; an op without a kernel here is the torch one."""

    name = "triton"

    def __init__(self, device: torch.device):
        super().__init__(device)
        # Packed linears are recorded with the torch attention's masks, which this set never makes.
        self.linear_library = ""

    # -- attention over pages -----------------------------------------------------------------

    # -- KV pages -----------------------------------------------------------------------------

    # -- dense ------------------------------------------------------------------------------

    # -- vocabulary ---------------------------------------------------------------------------
