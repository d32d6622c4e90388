"""Runs a function in several processes that are the ranks of one group."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing


@dataclass
class Ended:
    """How one rank ended."""

    exit_code: int | None
    """None: it had to be killed; a negative number is a signal."""
    result: Any = None
    """What its function returned."""
    error: str = ""
    """What it raised: type and message."""
    seconds: float = 0.0
    """Until it ended."""


def run_ranks(
    size: int, function: Callable[..., Any], *args: Any, limit: float = 300.0
) -> list[Ended]:
    """Call `function(rank, *args)` on every rank of a gloo group; how each one ended.

    function: of a module, so that other processes find it.
    limit: seconds after which ranks are killed.
    """
    context = torch.multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ddtree-ranks-") as folder:
        processes = [
            context.Process(target=_run, args=(folder, rank, size, function, args))
            for rank in range(size)
        ]
        started = time.monotonic()
        for process in processes:
            process.start()
        ended = [Ended(None) for _ in processes]
        while time.monotonic() - started < limit and any(e.exit_code is None for e in ended):
            for end, process in zip(ended, processes, strict=True):
                if end.exit_code is None and process.exitcode is not None:
                    end.exit_code, end.seconds = process.exitcode, time.monotonic() - started
            time.sleep(0.02)
        for process in processes:
            if process.exitcode is None:
                process.kill()
            process.join()
        for rank, end in enumerate(ended):
            path = Path(folder) / f"rank{rank}"
            if path.exists():
                end.result, end.error = pickle.loads(path.read_bytes())
        return ended


def results(ended: Sequence[Ended]) -> list[Any]:
    """What all ranks returned; fails if one of them did not end well."""
    for rank, end in enumerate(ended):
        assert end.exit_code == 0 and not end.error, f"rank {rank}: {end}"
    return [end.result for end in ended]


def _run(
    folder: str, rank: int, size: int, function: Callable[..., Any], args: Sequence[Any]
) -> None:
    torch.set_num_threads(1)
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    path = Path(folder) / f"rank{rank}"
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size
    )
    try:
        path.write_bytes(pickle.dumps((function(rank, *args), "")))
    except BaseException as error:
        said = "".join(traceback.format_exception_only(error)).strip()
        path.write_bytes(pickle.dumps((None, said)))
        raise
