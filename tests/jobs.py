"""Jobs for processes of their own; a module that takes no time to import."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def one_of(rank: int, folder: str, deed: str) -> None:
    """A job whose rank 1 fails, or waits for a signal, or is killed; rank 0 waits for long."""
    (Path(folder) / f"{rank}").write_text(str(os.getpid()))
    if rank and deed == "fail":
        raise OSError("the disk is full")
    if rank and deed == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)
