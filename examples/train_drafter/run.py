"""Starting a training run: the drafter is made or read, the processes are spawned."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ddtree.config import load_draft_config, load_target_config

from .batches import Store
from .checkpoint import NAMES, lock, write_json
from .drafter import TrainableDrafter
from .layout import copy_target_layers, initial_weights, load_weights, write_config
from .options import TrainOptions
from .processes import run_all
from .target import fingerprint, load_target_weights
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
        ValueError: the run exists and was started for another target or drafter shape, the
            drafter does not go with the target, or the run is being trained by somebody else.
    """
    about = {"target": fingerprint(target), "config": config, **origin}
    before = read_about(run)
    for key in ("target", "config") if before else ():
        if before[key] != about[key]:
            raise ValueError(
                f"run: {run} was started with another {key}; choose another --run to start anew"
            )
    if any((run / name).exists() for name in NAMES):
        about |= before  # where the weights came from, too
    with lock(run):
        write_config(run / "layout", config)
        load_draft_config(run / "layout", load_target_config(target))
        write_json(run / "run.json", about | {"options": asdict(options)})


def read_about(run: Path) -> dict:
    """What `prepare` has noted in a run's folder; empty where there is no run.

    Raises:
        ValueError: the file there is damaged.
    """
    path = run / "run.json"
    if not path.exists():
        return {}
    try:
        about = json.loads(path.read_text())
        if isinstance(about["target"], int) and isinstance(about["config"], dict):
            return about
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(
        f"run: {path} is damaged: it must hold the run's target, config and options; "
        "choose another --run to start anew"
    )


def check_target(run: Path, target: Path) -> None:
    """Refuse a target that the run in this folder was not started with.

    Raises:
        ValueError: it was another one, or the run's own notes are damaged.
    """
    about = read_about(run)
    if about and about["target"] != fingerprint(target):
        raise ValueError(
            f"run: {run} was started with another target; give that one, or choose another --run"
        )


def load_finite_weights(model: TrainableDrafter, folder: Path) -> None:
    """`load_weights` of a drafter that can be worked with.

    Raises:
        ValueError: as `load_weights`, or a weight is no finite number.
    """
    with torch.no_grad():
        load_weights(model, folder)
    for name, tensor in model.state_dict().items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(
                f"draft: {name} in {folder} must hold finite numbers only; "
                "the drafter has diverged in training: take another"
            )


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
    run_all(_train, (options, training, address), options.processes)


def _train(rank: int, options: RunOptions, training: TrainOptions, address: str | None) -> None:
    torch.set_num_threads(options.threads)
    if address is not None:
        dist.init_process_group(
            "gloo", init_method=address, rank=rank, world_size=options.processes
        )
    run = options.work / "runs" / options.name
    about = read_about(run)
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
            load_finite_weights(model, Path(about["init"]))

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
