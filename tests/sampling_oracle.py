"""What a sampled token must be: the target's logits by `transformers`, everything else in float64.

Only the noise itself is the engine's own; `test_noise.py` is about that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from stubs import hf_model

from ddtree import SamplingParams
from ddtree.tree.noise import gumbel

GAP = 1e-4
"""Perturbed logits, or distances to a filter's boundary, closer than this may go either way."""


@torch.inference_mode()
def raw_logits(folder: Path, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
    """Logits `[n, V]` float64 after the prompt and after each output token but the last."""
    ids = torch.tensor([[*prompt, *output[:-1]]])
    return hf_model(folder)(ids).logits[0, len(prompt) - 1 :].double()


def adjusted(
    logits: torch.Tensor,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    stops: Sequence[int],
) -> torch.Tensor:
    """`logits [V]` after bias, minimum length and penalties; `output` is what came before."""
    x = logits.clone()
    for token, value in (params.logit_bias or {}).items():
        x[token] += value
    if len(output) < params.min_new_tokens:
        x[list(stops)] = -torch.inf
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=len(x))
    seen = counts > 0
    seen[list(prompt)] = True
    repetition = params.repetition_penalty
    x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
    return x - counts * params.frequency_penalty - (counts > 0) * params.presence_penalty


def kept(x: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, float]:
    """Which of `x [V]` the filters keep, and how near the nearest boundary is."""
    keep, margin = torch.ones(len(x), dtype=torch.bool), float("inf")
    if not params.top_k and params.top_p == 1 and not params.min_p:
        return keep, margin
    ordered, order = x.sort(descending=True)
    if 0 < params.top_k < len(x):
        keep = x >= ordered[params.top_k - 1]
        margin = float(ordered[params.top_k - 1] - ordered[params.top_k])
    share = (x / params.temperature).softmax(0)
    if params.top_p < 1:
        within = share * keep / (share * keep).sum()
        before = within[order].cumsum(0) - within[order]
        margin = min(margin, float((before - params.top_p).abs().min()))
        least = ordered[before < params.top_p].min()
        keep = keep & (x >= least)
    if params.min_p > 0:
        worst = float(x.max()) + params.temperature * float(torch.tensor(params.min_p).log())
        keep = keep & (x >= worst)
        margin = min(margin, float((x - worst).abs().min()))
    return keep, margin


class SampledAgreement:
    """Checks sampled tokens one by one, each behind the tokens that really came before it."""

    SHARE = 1e-3

    def __init__(self, folder: Path, eos: Sequence[int] = ()):
        self.folder, self.eos = folder, tuple(eos)
        self.tokens = 0
        self.ties: list[str] = []
        self._seen: dict[object, list[str]] = {}

    def check(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int | None,
        got: Sequence[int],
        label: str,
    ) -> None:
        """Assert that `got` is what `params` and `seed` make of the target, up to near-ties."""
        key = (tuple(prompt), str(params), seed, tuple(got))
        if key not in self._seen:
            self._seen[key] = self._ties(prompt, params, seed, got, label)
        self.tokens += len(got)
        self.ties += self._seen[key]

    def _ties(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        seed: int | None,
        got: Sequence[int],
        label: str,
    ) -> list[str]:
        logits = raw_logits(self.folder, prompt, got)
        stops = [*params.stop_token_ids, *(() if params.ignore_eos else self.eos)]
        noise = torch.zeros_like(logits)
        if params.temperature > 0:
            places = len(prompt) + torch.arange(len(got))
            noise = gumbel(torch.tensor([seed]), places[None], 0, logits.shape[1])[0].double()
        ties = []
        for i, token in enumerate(got):
            x, margin = adjusted(logits[i], params, prompt, got[:i], stops), float("inf")
            if params.temperature > 0:
                keep, margin = kept(x, params)
                x = torch.where(keep, x + params.temperature * noise[i], -torch.inf)
            gap = float(x.max() - x[token])
            if gap == 0:
                continue
            near = gap < GAP or margin < GAP
            assert near, f"{label}: token {i} is {token}, not {int(x.argmax())} (gap {gap:.2e})"
            ties.append(f"{label}: token {i}, gap {gap:.1e}, margin {margin:.1e}")
        return ties

    def close(self) -> None:
        """Log the near-ties, and assert that they are rare."""
        print(f"\n{len(self.ties)} near-ties in {self.tokens} tokens", *self.ties, sep="\n  ")
        assert len(self.ties) <= self.SHARE * self.tokens


def assert_logprobs(
    folder: Path,
    prompt: Sequence[int],
    output: Sequence[int],
    found: Sequence[dict[int, float]],
    n: int,
) -> None:
    """Each entry has the token's own logprob first, then those of the n most likely."""
    exact = raw_logits(folder, prompt, output).log_softmax(1)
    assert len(found) == len(output)
    for token, entry, row in zip(output, found, exact, strict=True):
        assert next(iter(entry)) == token
        ids = torch.tensor(list(entry))
        assert (torch.tensor(list(entry.values())) - row[ids]).abs().max() < GAP
        best = row.topk(n) if n else None
        assert set(entry) == {token, *(best.indices.tolist() if best else ())}


def sequences(
    generate: Callable[..., list], jobs: Sequence[tuple[list[int], SamplingParams]]
) -> list[list[int]]:
    """Output ids of `jobs` by an engine's `generate`."""
    outputs = generate([prompt for prompt, _ in jobs], [params for _, params in jobs])
    return [output.token_ids for output in outputs]
