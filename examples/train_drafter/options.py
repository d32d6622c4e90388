"""What a training run is asked to do, and where it is."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TrainOptions:
    """What a run is asked to do; everything but the limits is fixed for the life of a run."""

    steps: int = 0  # end after so many steps; 0 = no such limit
    minutes: float = 0.0  # end after so much processor time, all resumes together; 0 = no limit
    batch: int = 8  # sequences per process and step
    anchors: int = 64  # blocks per sequence
    lr: float = 6e-4
    warmup: int = 50  # steps
    decay: float = 0.3  # last share of the run in which the learning rate falls to zero
    weight_decay: float = 0.01
    dropout: float = 0.1
    clip: float = 1.0
    ema: float = 0.998
    gamma: float = 2.5  # loss weight of depth d is exp(-(d - 1) / gamma)
    distill: float = 0.5  # share of distillation at depth 1 of greedy sequences
    distill_fall: float = 0.5  # and how that share falls per depth
    sampled_fall: float = 0.4  # how the weight of sampled sequences falls per depth
    negatives: int = 1024
    common: int = 2048
    reach: tuple[int, ...] = ()  # context windows of the first stages, then everything
    reach_share: float = 0.4  # share of the run in which the stages pass
    seed: int = 0
    save_seconds: float = 45.0
    eval_seconds: float = 600.0
    eval_items: int = 40
    eval_tokens: int = 96


@dataclass
class Progress:
    """Where a run is: everything of it goes into the checkpoint."""

    step: int = 0
    epoch: int = 0
    position: int = 0  # batches of this epoch's plan that are done
    shards: list[str] = field(default_factory=list)  # that this epoch's plan is made of
    eval_shards: list[str] = field(default_factory=list)  # whose held-out part is the yardstick
    seconds: float = 0.0  # processor time of one process: a busy machine and pauses do not count
    best: float = 0.0
    evaluated: int = -1  # step of the last proxy evaluation
