"""The training loop: data-parallel over processes, resumable at any moment."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .batches import Batch, Store, epoch_plan, make_batch, random_anchors, token_counts
from .checkpoint import best_before, load_state, save_state, write_json
from .curves import Curves
from .drafter import TrainableDrafter
from .layout import save_drafter
from .loss import SampledHead, block_loss
from .options import Progress, TrainOptions
from .proxy import proxy_sums
from .target import TargetWeights


class Trainer:
    """One process of a run. Rank 0 writes; all ranks hold the same weights."""

    def __init__(
        self,
        run: Path,
        config_json: dict,
        model: TrainableDrafter,
        target: TargetWeights,
        store: Store,
        options: TrainOptions,
        say: Callable[[str], object] = print,
    ) -> None:
        self.run, self.config_json, self.model, self.target = run, config_json, model, target
        self.store, self.options = store, options
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.world = dist.get_world_size() if dist.is_initialized() else 1
        self.say = say if self.rank == 0 else (lambda text: None)
        decayed = [p for p in model.parameters() if p.dim() == 2]
        plain = [p for p in model.parameters() if p.dim() != 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": options.weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=options.lr,
            betas=(0.9, 0.98),
        )
        self.device = target.head.device
        self.ema = {name: p.detach().clone() for name, p in model.state_dict().items()}
        self.progress = Progress()
        self.curves = Curves(run)
        self.stop = False  # what all processes have agreed on
        self._wish = False  # what a signal asked of this one
        self._spent = 0.0  # processor seconds of its last step
        depth = model.config.block_size - 1
        self.depth_weights = torch.exp(-torch.arange(depth) / options.gamma)
        self._parameters = decayed + plain

    # -- state ------------------------------------------------------------------------------

    def resume(self) -> bool:
        """Go on from the run's checkpoint, where it has one; says whether it had.

        Raises:
            ValueError: no checkpoint there can be read, or it is of another drafter.
        """
        state = load_state(self.run, self.say)
        if state is None:
            self.progress.best = best_before(self.run)
            self.curves.truncate(-1)
            return False
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.ema = {name: tensor.to(self.device) for name, tensor in state["ema"].items()}
            self.progress = Progress(**state["progress"])
        except (KeyError, TypeError, RuntimeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"run: the checkpoint in {self.run} does not fit this drafter; "
                "delete last.pt and previous.pt there to start the run anew"
            ) from error
        self.curves.truncate(self.progress.step)
        self.curves.window = state.get("window", [])
        return True

    def save(self) -> None:
        if self.rank == 0:
            state: dict[str, Any] = {
                "model": self.model.state_dict(),
                "ema": self.ema,
                "optimizer": self.optimizer.state_dict(),
                "progress": asdict(self.progress),
                "window": self.curves.window,
                "options": asdict(self.options),
            }
            save_state(self.run, state)

    # -- schedule ---------------------------------------------------------------------------

    def share_done(self) -> float:
        """How much of the run is over, in [0, 1]."""
        o, p = self.options, self.progress
        by_steps = p.step / o.steps if o.steps else 0.0
        by_time = p.seconds / (60 * o.minutes) if o.minutes else 0.0
        return min(1.0, max(by_steps, by_time))

    def learning_rate(self) -> float:
        o = self.options
        warm = min(1.0, (self.progress.step + 1) / max(1, o.warmup))
        left = (1.0 - self.share_done()) / o.decay if o.decay else 1.0
        return o.lr * warm * min(1.0, left)

    def reach(self) -> int:
        """Context window of the current stage; 0 = all of it."""
        o = self.options
        if not o.reach:
            return 0
        stage = int(self.share_done() / o.reach_share * len(o.reach)) if o.reach_share else 99
        return o.reach[stage] if stage < len(o.reach) else 0

    # -- one step ---------------------------------------------------------------------------

    def _generator(self, *key: int) -> torch.Generator:
        seed = self.options.seed
        for part in key:
            seed = (seed * 1_000_003 + part + 1) % (2**63 - 25)
        return torch.Generator().manual_seed(seed)

    def _new_epoch(self) -> None:
        names = [self.store.refresh()]
        if self.world > 1:
            dist.broadcast_object_list(names, src=0)
        self.progress.shards = names[0]

    def _epoch_items(self) -> tuple[list, list[list[int]]]:
        self.store.refresh()
        items = [item for name in self.progress.shards for item in self.store.train.get(name, ())]
        o, weight = self.options, self.target.head
        counts = token_counts(items, weight.shape[0])
        self.head = SampledHead(weight, counts, o.common, o.negatives)
        generator = self._generator(self.progress.epoch)
        return items, epoch_plan(items, o.batch * self.world, generator)

    def loss(self, batch: Batch, generator: torch.Generator) -> Tensor:
        """Loss of one batch; gradients reach the drafter only."""
        with torch.no_grad():
            embeddings = self.target.embedding[batch.blocks]
        hidden = self.model(embeddings, batch.features, batch.positions, self.reach())
        hidden = hidden[:, :, 1:]
        o = self.options
        depth = torch.arange(batch.labels.shape[-1], device=batch.labels.device)
        greedy = batch.greedy[:, None, None]
        # What a sampled answer says about a greedy one is the target's distribution at its places,
        # and less and less of that with depth: its own tokens are between.
        share = torch.where(greedy, o.distill * o.distill_fall**depth, 1.0).expand_as(batch.labels)
        weights = batch.weights * torch.where(greedy, 1.0, o.sampled_fall**depth)
        return block_loss(
            hidden.flatten(0, 2),
            batch.teacher.flatten(0, 2) if o.distill else None,
            batch.labels.flatten(),
            weights.flatten(),
            share.flatten(),
            self.head,
            generator,
        )

    def step(self, batch: Batch, generator: torch.Generator) -> float:
        """Change the weights by one batch; returns its loss.

        Raises:
            ValueError: loss or gradients are no finite numbers; the weights are as they were.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.zero_grad(set_to_none=True)
        torch.manual_seed(generator.initial_seed() + 1)  # dropout draws from the default generator
        loss = self.loss(batch, generator)
        loss.backward()
        value = self._average_gradients(loss.item())
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.options.clip)
        if not math.isfinite(value) or not bool(norm.isfinite()):
            raise ValueError(
                f"train: the run diverged: the loss of step {self.progress.step + 1} is {value} "
                f"and its gradient's norm {float(norm)}; choose another --run with a lower --lr"
            )
        self.optimizer.step()
        decay = min(self.options.ema, (1 + self.progress.step) / (10 + self.progress.step))
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                self.ema[name].lerp_(tensor, 1 - decay)
        return value

    def _average_gradients(self, loss: float) -> float:
        """Means over the processes, in one buffer: gradients, loss, the wish to stop, and the time
        spent, so that all have the same learning rate and end after the same step."""
        if self.world == 1:
            self.stop = self._wish
            self.progress.seconds += self._spent
            return loss
        extra = torch.tensor([loss, float(self._wish), self._spent])
        flat = torch.cat([p.grad.flatten() for p in self._parameters] + [extra])
        dist.all_reduce(flat)
        flat /= self.world
        offset = 0
        for p in self._parameters:
            p.grad.copy_(flat[offset : offset + p.numel()].view(p.shape))
            offset += p.numel()
        self.stop = bool(flat[-2] > 0)
        self.progress.seconds += float(flat[-1])
        return float(flat[-3])

    # -- the run ----------------------------------------------------------------------------

    def train(self) -> None:
        """Train until the limits of the options, SIGTERM or SIGINT; then save and return.

        Raises:
            ValueError: there is no usable data.
        """
        before = {
            number: signal.signal(number, lambda *_: setattr(self, "_wish", True))
            for number in (signal.SIGTERM, signal.SIGINT)
        }
        try:
            self._train()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _train(self) -> None:
        o, p = self.options, self.progress
        if not self.store.refresh():
            raise ValueError(f"train: no usable feature shards in {self.store.work / 'features'}")
        if not p.shards:
            self._new_epoch()
        p.eval_shards = p.eval_shards or p.shards
        saved = evaluated = time.monotonic()
        if p.step == 0:
            self.evaluate()
        while not self.stop and self.share_done() < 1.0:
            items, plan = self._epoch_items()
            if not plan:
                raise ValueError("train: fewer sequences than one batch; lower --batch")
            while p.position < len(plan) and not self.stop and self.share_done() < 1.0:
                began = time.process_time()
                value = self.step(*self._make(items, plan[p.position]))
                p.step += 1
                p.position += 1
                self._spent = (time.process_time() - began) / torch.get_num_threads()
                if self.rank == 0:
                    self.curves.loss(p.step, p.seconds, value, self.learning_rate())
                    if time.monotonic() - saved > o.save_seconds:
                        self.save()
                        saved = time.monotonic()
                if self._due(evaluated):
                    self.evaluate()
                    evaluated = time.monotonic()
            if p.position >= len(plan):
                p.epoch, p.position = p.epoch + 1, 0
                self._new_epoch()
        if not self.stop and p.evaluated != p.step:
            self.evaluate()
        self.save()

    def _write_result(self) -> None:
        """Say in `result.json` what the best weights so far were made from."""
        p = self.progress
        items = [item for name in p.shards for item in self.store.train.get(name, ())]
        per_epoch = max(1, len(items) // (self.options.batch * self.world))
        result = {
            "step": p.step,
            "seconds": round(p.seconds, 1),
            "epoch": round(p.epoch + p.position / per_epoch, 2),
            "chain": p.best,
            "processes": self.world,
            "sequences": len(items),
            "answer_tokens": sum(len(item.sequence.answer) for item in items),
            "options": asdict(self.options),
        }
        write_json(self.run / "result.json", result)

    def _due(self, evaluated: float) -> bool:
        due = [time.monotonic() - evaluated > self.options.eval_seconds]
        if self.world > 1:
            dist.broadcast_object_list(due, src=0)
        return due[0]

    def _make(self, items: list, indices: list[int]) -> tuple[Batch, torch.Generator]:
        o, config = self.options, self.model.config
        generator = self._generator(self.progress.step, self.rank)
        mine = [items[i] for i in indices[self.rank :: self.world]]
        anchors = [random_anchors(item, o.anchors, generator) for item in mine]
        batch = make_batch(
            mine, anchors, config.block_size, config.mask_token_id, self.depth_weights
        )
        return batch.to(self.device), generator

    def evaluate(self) -> None:
        """Proxy acceptance of the averaged weights on held-out sequences; keeps the best.

        Raises:
            ValueError: they are no finite numbers; nothing is written.
        """
        o, p = self.options, self.progress
        if not all(bool(t.to(torch.bfloat16).isfinite().all()) for t in self.ema.values()):
            raise ValueError(
                f"train: the run diverged: at step {p.step} its weights are no finite numbers; "
                "choose another --run with a lower --lr"
            )
        p.evaluated = p.step
        current = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.model.load_state_dict(self.ema)
        self.model.eval()
        heldout = [item for name in p.eval_shards for item in self.store.heldout.get(name, ())]
        mine = heldout[: o.eval_items][self.rank :: self.world]
        sums = proxy_sums(self.model, self.target, mine, o.eval_tokens)
        self.model.load_state_dict(current)
        self.model.train()
        if self.world > 1:
            dist.all_reduce(sums)
        if self.rank:
            return
        chain, hits = float(sums[0] / sums[1].clamp_min(1)), (sums[3:] / sums[2].clamp_min(1))
        self.curves.acceptance(p.step, p.seconds, p.epoch, chain, hits.tolist())
        save_drafter(self.run / "latest", self.config_json, self.ema)
        # Without held-out answers the newest is the best, but untrained weights are never better.
        untrained_over_another = p.step == 0 and (self.run / "best" / "model.safetensors").exists()
        if chain > p.best or (not sums[1] and not untrained_over_another):
            p.best = chain
            save_drafter(self.run / "best", self.config_json, self.ema)
            self._write_result()
        self.say(
            f"step {p.step}  epoch {p.epoch}  {p.seconds / 60:.1f} min  loss {self.curves.mean:.3f}"
            f"  chain {chain:.3f}  depth hits " + " ".join(f"{h:.3f}" for h in hits.tolist())
        )
