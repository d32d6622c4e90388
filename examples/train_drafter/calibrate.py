"""How often a drafter's candidates are right, depth by depth: fits the calibration of its trees."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ddtree import Engine, SamplingParams
from ddtree.config import Calibration
from ddtree.models.llama import Llama
from ddtree.tree.noise import gumbel

from .batches import Item, make_batch
from .data import Sequence
from .drafter import TrainableDrafter
from .features import compute_features
from .generate import chat_ids
from .target import TargetWeights

TEMPERATURES = (0.0, 0.7, 1.0)
CANDIDATES = 64
"""Candidates per depth that are looked at, as many as a tree of that budget can have."""
RANKINGS = (1.0, 1.5, 2.5)
"""Candidates are the best by any of these alphas."""
REACH = 8
"""A depth counts where the tokens above were among so many candidates, as on a tree's paths."""
LEAST = 200
"""Positions that a depth's own numbers need; deeper ones take those of the depth above."""


@dataclass
class Records:
    """Candidates of `n` positions at every depth, `P` each, and which of them was right."""

    log_q: Tensor  # [n, L, P] float32 tempered log-probabilities; -inf at padding
    noise: Tensor  # [n, L, P] float32 g; 0 at temperature 0
    right: Tensor  # [n, L, P] bool
    known: Tensor  # [n, L] bool: the sequence has a token there


@dataclass(frozen=True)
class Answer:
    """One sequence that the target wrote, and the seed that it was sampled with."""

    sequence: Sequence
    seed: int


def answer(engine: Engine, prompts: list[str], max_new_tokens: int, seed: int) -> list[Answer]:
    """Let the engine answer the prompts: a third of them at each temperature."""
    answers = []
    for number, temperature in enumerate(TEMPERATURES):
        ids = [chat_ids(engine, prompt) for prompt in prompts[number :: len(TEMPERATURES)]]
        params = [
            SamplingParams(max_new_tokens=max_new_tokens, temperature=temperature, seed=seed + i)
            for i in range(len(ids))
        ]
        for row, output in enumerate(engine.generate(ids, params, progress=True)):
            tokens = np.array(output.prompt_token_ids + output.token_ids)
            sequence = Sequence(tokens, len(output.prompt_token_ids), temperature)
            answers.append(Answer(sequence, seed + row))
    return answers


def record(
    answers: list[Answer],
    model: TrainableDrafter,
    target: Llama,
    weights: TargetWeights,
    tokens: Tensor | None = None,
) -> dict[float, Records]:
    """Draft at every position of the answers; the records of each temperature.

    model:  the drafter.
    target: the engine's target model, for the features; weights: its head and embedding.
    tokens: [n] int64, those that it drafts; None for all.
    """
    parts: dict[float, list[Records]] = {}
    for one in answers:
        sequence = one.sequence
        if len(sequence.tokens) > sequence.start + 1:
            rows = compute_features(target, [sequence.tokens], model.config.target_layer_ids)
            item = Item(sequence, rows, model.config.hidden_size)
            found = _draft(model, weights, item, one.seed, tokens)
            parts.setdefault(sequence.temperature, []).append(found)
    if missing := [t for t in TEMPERATURES if t not in parts]:
        raise ValueError(
            f"prompts: no answer has two tokens at temperature {missing[0]}; give more"
        )
    records = {}
    for temperature, found in parts.items():
        fields = zip(*(vars(part).values() for part in found), strict=True)
        records[temperature] = Records(*(torch.cat(field) for field in fields))
    return records


@torch.inference_mode()
def _draft(
    model: TrainableDrafter,
    target: TargetWeights,
    item: Item,
    seed: int,
    tokens: Tensor | None = None,
) -> Records:
    """The candidates at every answer position of one sequence."""
    config, temperature = model.config, item.sequence.temperature
    depth = config.block_size - 1
    anchors = torch.arange(item.sequence.start, len(item.sequence.tokens) - 1)
    ones = torch.ones(depth)
    batch = make_batch([item], [anchors], config.block_size, config.mask_token_id, ones)
    hidden = model(target.embedding[batch.blocks], batch.features, batch.positions)[0, :, 1:]
    barred = torch.zeros(len(target.head))
    if tokens is not None:
        barred.fill_(-torch.inf).index_fill_(0, tokens, 0.0)
    parts = []
    for at, states, labels in zip(anchors, hidden, batch.labels[0], strict=True):
        logits = states @ target.head.t() + barred
        log_q = (logits / (temperature or 1.0)).log_softmax(-1)
        noise, rankings = torch.zeros_like(log_q), RANKINGS[:1]
        if temperature:
            positions = at + torch.arange(1, depth + 1)
            noise = gumbel(torch.tensor([seed]), positions[None], 0, log_q.shape[1])[0]
            rankings = RANKINGS
        count = min(CANDIDATES, int(barred.isfinite().sum()))
        best = [(a * log_q + noise).topk(count, -1).indices for a in rankings]
        ids = torch.cat(best, -1).sort(-1).values
        again = F.pad(ids[:, 1:] == ids[:, :-1], (1, 0))
        parts.append(
            (
                log_q.gather(1, ids).masked_fill(again, -torch.inf),
                noise.gather(1, ids),
                (ids == labels[:, None]) & ~again,
            )
        )
    known = batch.weights[0] > 0
    log_q, noise, right = (torch.stack(part) for part in zip(*parts, strict=True))
    return Records(log_q, noise, right & known[:, :, None], known)


def fit(records: dict[float, Records]) -> Calibration:
    """The calibration under which the records are likeliest.

    At each depth the right token is one of the candidates with probability `hit`, and then it is
    v with probability proportional to `exp(s(v) / scale)`, `s = alpha * log q + g`.
    """
    sampled = _fit([r for t, r in records.items() if t > 0], noisy=True)
    greedy = _fit([r for t, r in records.items() if t == 0], noisy=False)
    return Calibration(
        alpha=tuple(trust / heat for trust, heat, _ in sampled),
        scale=tuple(1 / heat for _, heat, _ in sampled),
        hit=tuple(hit for _, _, hit in sampled),
        greedy_scale=tuple(1 / trust for trust, _, _ in greedy),
        greedy_hit=tuple(hit for _, _, hit in greedy),
    )


def _fit(records: list[Records], noisy: bool) -> list[tuple[float, float, float]]:
    """Per depth: the factors of log q and of the noise, and the share of hits."""
    parts = []
    for r in records:
        ranking = torch.where(r.log_q.isfinite(), RANKINGS[1] * r.log_q + r.noise, -torch.inf)
        order = ranking.topk(min(CANDIDATES, ranking.shape[-1]), -1).indices
        parts.append([x.gather(2, order) for x in (r.log_q, r.noise, r.right)] + [r.known])
    log_q, noise, right, known = (torch.cat(x) for x in zip(*parts, strict=True))
    reached = torch.ones(len(known), dtype=torch.bool)
    found: list[tuple[float, float, float]] = []
    for depth in range(log_q.shape[1]):
        use = reached & known[:, depth]
        reached = use & right[:, depth, :REACH].any(-1)
        hits = right[use, depth].any(-1)
        if found and int(hits.sum()) < LEAST:
            found.append(found[-1])
            continue
        chosen = use.nonzero()[:, 0][hits]
        if not len(chosen):
            raise ValueError("prompts: the drafter is never right; it cannot be calibrated")
        factors = _likeliest(
            log_q[chosen, depth], noise[chosen, depth], right[chosen, depth], noisy
        )
        found.append((*factors, float(hits.double().mean())))
    return found


def _likeliest(log_q: Tensor, noise: Tensor, right: Tensor, noisy: bool) -> tuple[float, float]:
    """Factors of `log_q [n, P]` and `noise [n, P]` in the multinomial logit of `right [n, P]`."""
    label = right.int().argmax(-1)
    log_q = log_q.clamp_min(-1e4)  # padding; an infinite number would give no gradient
    powers = torch.zeros(2, requires_grad=True)
    solver = torch.optim.LBFGS([powers], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Any:
        solver.zero_grad()
        trust, heat = powers.exp()
        value = F.cross_entropy(trust * log_q + (heat * noise if noisy else 0.0), label)
        # A weak pull towards 1, so that few positions cannot send the factors far away.
        value = value + powers.square().sum() / len(label)
        value.backward()
        return value

    solver.step(loss)
    trust, heat = powers.detach().exp().tolist()
    if not (math.isfinite(trust) and math.isfinite(heat)):
        raise ValueError("prompts: no calibration fits what the drafter drafted; give more")
    return trust, heat
