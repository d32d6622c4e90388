"""Several processes of one job: they end together, and a mistake in one is told once."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

import torch.multiprocessing as mp

GRACE = 30.0
"""Seconds for the other processes to end when one has failed."""
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_all(job: Callable[..., None], args: tuple, count: int) -> None:
    """Run `job(rank, *args)` in `count` new processes and wait for all of them.

    Ctrl-C and SIGTERM are passed on as SIGTERM. No process is left behind.

    Raises:
        ValueError: a process ended with a ValueError or OSError, whose text it has, or was killed.
        RuntimeError: a process ended with another error; the traceback is in it.
        KeyboardInterrupt: a process ended of the signal, with nothing to save yet.
    """
    processes: list[BaseProcess] = []
    asked: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        _terminate(processes)

    before = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        said = mp.get_context("spawn").SimpleQueue()
        # What a terminal sends to all of them must not end a child that is not up yet with a
        # traceback: an ignored signal is inherited.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        context = mp.spawn(_child, (job, args, os.getpid(), said), count, join=False, daemon=True)
        processes += context.processes
        signal.signal(signal.SIGINT, pass_on)
        if asked:
            _terminate(processes)
        codes = _wait(processes)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if any(codes):
        _fail(codes, said, bool(asked))


def _child(rank: int, job: Callable[..., None], args: tuple, parent: int, said: Any) -> None:
    """Run the job; tell the parent what went wrong, as `(is it the user's, text)`."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if os.getppid() != parent:  # it ended while its signal to us was still ignored
        sys.exit(1)
    try:
        job(rank, *args)
    except (ValueError, OSError) as error:
        said.put((True, str(error)))
        sys.exit(1)
    except Exception:
        said.put((False, traceback.format_exc()))
        sys.exit(1)


def _wait(processes: list[BaseProcess]) -> list[int | None]:
    """Wait until all have ended, or one has failed; then end the others.

    Returns:
        the exit codes at that moment; None of a process that was still running.
    """
    while True:
        running = [process for process in processes if process.exitcode is None]
        codes = [process.exitcode for process in processes]
        if not running or any(codes):
            break
        wait([process.sentinel for process in running])
    _terminate(running)
    for process in running:
        process.join(GRACE)
        if process.exitcode is None:
            process.kill()
            process.join()
    return codes


def _terminate(processes: list[BaseProcess]) -> None:
    for process in processes:
        if process.exitcode is None:
            process.terminate()


def _fail(codes: list[int | None], said: Any, asked: bool) -> None:
    """Raise what the processes have said, the user's mistakes first."""
    texts: dict[bool, list[str]] = {True: [], False: []}
    while not said.empty():
        clean, text = said.get()
        texts[clean].append(text)
    if texts[True]:
        raise ValueError(texts[True][0])
    if asked:
        raise KeyboardInterrupt
    for rank, code in enumerate(codes):
        if code is not None and code < 0:
            raise ValueError(
                f"train: process {rank} was ended by {signal.Signals(-code).name}; the same "
                "command goes on from the last checkpoint"
            )
    raise RuntimeError("a process failed:\n" + "\n".join(texts[False]))
