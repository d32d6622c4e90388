"""Starting a training run: the drafter is made or read, the processes are spawned."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ddtree.config import load_draft_config, load_target_config

from .batches import Store
from .checkpoint import lock
from .drafter import TrainableDrafter
from .layout import copy_target_layers, initial_weights, load_weights, write_config
from .options import TrainOptions
from .target import load_target_weights
from .train import Trainer


@dataclass(frozen=True)
class RunOptions:
    """Where a run reads and writes, and with how many processes."""

    work: Path
    name: str
    target: Path
    processes: int = 1
    threads: int = 1


def prepare(run: Path, target: Path, config: dict, options: TrainOptions, origin: dict) -> None:
    """Make a run folder, or check that the one there was made for the same thing.

    Raises:
        ValueError: the run exists and was started for another target or drafter shape.
    """
    about = {"target": load_target_weights(target).fingerprint, "config": config, **origin}
    path = run / "run.json"
    if path.exists():
        before = json.loads(path.read_text())
        for key in ("target", "config"):
            if before[key] != about[key]:
                raise ValueError(
                    f"run: {run} was started with another {key}; choose another --run to start anew"
                )
        about = before
    about["options"] = asdict(options)
    write_config(run / "layout", config)
    path.write_text(json.dumps(about, indent=1) + "\n")


def start(options: RunOptions, training: TrainOptions) -> None:
    """Train in `options.processes` processes and wait for them.

    Raises:
        ValueError: the run is being trained by somebody else, or there is no usable data.
    """
    with lock(options.work / "runs" / options.name):
        _start(options, training)


def _start(options: RunOptions, training: TrainOptions) -> None:
    if options.processes == 1:
        _train(0, options, training, None)
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    mp.spawn(_train, args=(options, training, address), nprocs=options.processes)


def _train(rank: int, options: RunOptions, training: TrainOptions, address: str | None) -> None:
    torch.set_num_threads(options.threads)
    if address is not None:
        dist.init_process_group(
            "gloo", init_method=address, rank=rank, world_size=options.processes
        )
    run = options.work / "runs" / options.name
    about = json.loads((run / "run.json").read_text())
    config = load_draft_config(run / "layout", load_target_config(options.target))
    alone_on_gpu = options.processes == 1 and torch.cuda.is_available()
    device = torch.device("cuda" if alone_on_gpu else "cpu")
    torch.set_float32_matmul_precision("high")  # TF32 on GPUs; no change on CPU
    target = load_target_weights(options.target).to(device)
    model = TrainableDrafter(config, device=device, dropout=training.dropout)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(training.seed)
        initial_weights(model, generator)
        if about.get("init") == "target":
            copy_target_layers(model, options.target, load_target_config(options.target).num_layers)
        elif about.get("init"):
            load_weights(model, Path(about["init"]))

    def say(text: str) -> None:
        print(text, flush=True)

    store = Store(options.work, config.target_layer_ids, target.fingerprint, say)
    trainer = Trainer(run, about["config"], model, target, store, training, say)
    if trainer.resume():
        trainer.say(f"resumed at step {trainer.progress.step}")
    trainer.say(f"process {os.getpid()} of {options.processes}")
    trainer.train()
    if address is not None:
        dist.destroy_process_group()
