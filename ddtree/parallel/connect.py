"""From a process group, or torchrun's environment, to the group of ranks that an engine runs on."""

from __future__ import annotations

import atexit
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ddtree.parallel.shards import SINGLE, Parallel

TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a launcher sets for every process it starts."""
ARRIVAL = 10
"""Timeouts that ranks may come to their first engine apart."""


def connect(process_group: Any, device_type: str, timeout: float) -> Parallel:
    """The ranks of `process_group`; of the default group, or all of torchrun's, where it is None.

    Args:
        device_type: "cpu" (gloo) or "cuda" (NCCL).
        timeout: seconds after which a rank that does not answer within a step is given up.

    Raises:
        ValueError: `process_group` is no process group of this process.
        LostRankError: not all of its ranks construct an engine.
    """
    if process_group is None:
        launched = all(name in os.environ for name in TORCHRUN)
        if not dist.is_available() or not (dist.is_initialized() or launched):
            return SINGLE
    if process_group is None:
        if not dist.is_initialized():
            if os.environ["WORLD_SIZE"] == "1":
                return SINGLE
            # It stays when the engine is closed: torch cannot make it again on the same store.
            limit = timedelta(seconds=ARRIVAL * timeout)
            dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=limit)
            atexit.register(_leave)
        process_group = dist.group.WORLD
    known = isinstance(process_group, dist.ProcessGroup)
    if not known or dist.get_rank(process_group) < 0:
        raise ValueError(
            "process_group: expected a torch.distributed process group that this process is in, "
            f"got {process_group!r}"
        )
    if dist.get_world_size(process_group) == 1:
        return SINGLE
    from ddtree.parallel.group import Group

    return Group(process_group, device_type, timeout, ARRIVAL * timeout)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def place(device: str | torch.device | None, several: bool = False) -> torch.device:
    """The device that this process uses.

    Args:
        device: what the user asked for; None: CUDA where there is a device, else the CPU.
        several: whether it is one of several ranks: then "cuda" is the device of torchrun's local
            rank. A CUDA device becomes the process's current one: kernels are launched there.

    Raises:
        ValueError: there is no such device here.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f'device: expected "cpu" or "cuda", got {device}')
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: {device} was asked for, but there is no CUDA device here")
    if device.type == "cuda":
        if several and device == torch.device("cuda"):
            local = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
            device = torch.device("cuda", local % torch.cuda.device_count())
        if device != torch.device("cuda"):
            torch.cuda.set_device(device)
    return device
