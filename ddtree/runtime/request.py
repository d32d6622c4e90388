"""A request from arrival to output: its tokens, its place in the batch, its statistics."""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ddtree.config import SamplingParams
from ddtree.runtime.plan import (
    ROW_RUNNING,
    ROW_STOPPED,
    TOP_LOGPROBS,
    Level,
    RowReport,
    SamplingRow,
)

WAITING, PREFILL, RUNNING, FINISHED = "waiting", "prefill", "running", "finished"


@dataclass
class RoundTrace:
    """The tree of one round, for drawing (`output.trace`, one entry a round).

    `tokens`, `parents`, `scores` list the nodes, best first; node 0 is the anchor, its parent -1.
    `path` are the accepted nodes, the anchor included; `emitted` the round's tokens.
    """

    tokens: list[int]
    parents: list[int]
    scores: list[float]
    path: list[int]
    emitted: list[int]


@dataclass
class RequestStats:
    """What a request's decoding took.

    The first token comes from prefill, so `acceptance_length` (tokens per round, the bonus token
    included) is `(len(token_ids) - 1) / rounds`.
    """

    rounds: int = 0
    acceptance_histogram: dict[int, int] = field(default_factory=dict)
    """Tokens emitted in a round -> number of such rounds."""
    draft_nodes: int = 0
    """Tree nodes below the root, summed over the rounds."""
    ttft: float = 0.0
    """Seconds from arrival to the first token."""
    decode_seconds: float = 0.0
    """Seconds from the first token to the last."""
    stage_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of the request's rounds per stage: draft, build, verify, commit, host."""

    @property
    def acceptance_length(self) -> float:
        """Tokens per round; 0.0 before the first round."""
        emitted = sum(n * rounds for n, rounds in self.acceptance_histogram.items())
        return emitted / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens (the first aside) per second of decoding; 0.0 when there are none."""
        emitted = sum(n * rounds for n, rounds in self.acceptance_histogram.items())
        return emitted / self.decode_seconds if self.decode_seconds > 0 else 0.0


@dataclass
class RequestOutput:
    """The finished result of one prompt."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    """``"stop"``, ``"length"`` or ``"abort"``."""
    stop_reason: int | str | None
    """The stop id or stop string that ended it; None for the model's own EOS or a limit."""
    seed: int | None
    """What sampled tokens depend on: the request's seed, or the one drawn for it."""
    logprobs: list[dict[int, float]] | None
    """Per token: its log-probability first, then those of the most likely tokens, by id; under the
    target's distribution before temperature, penalties and filters."""
    stats: RequestStats
    trace: list[RoundTrace] | None


class Request:
    """One prompt in the engine.

    Args:
        request_id: arrival number; the scheduler serves lower ones first.
        prompt: token ids.
        params: the request's sampling parameters.
        limit: prompt plus output tokens at which the request ends.
        budget: the engine's tree nodes below the root (0: plain decoding).
        eos_ids: the model's own end-of-sequence ids.
        stream: takes ids and gives text: `push(ids) -> (text, match or None)`, where a match has
            `num_ids` (how many to keep) and `text` (the stop string); `finish() -> text`, which may
            still find a `match`.
    """

    def __init__(
        self,
        request_id: int,
        prompt: list[int],
        params: SamplingParams,
        limit: int,
        budget: int,
        eos_ids: tuple[int, ...],
        stream: Any,
    ):
        self.id = request_id
        self.prompt = prompt
        self.params = params
        self.limit = limit
        self.chain = params.speculation == "chain"
        self.budget = budget if params.budget is None else params.budget
        if params.speculation == "off":
            self.budget = 0
        eos = () if params.ignore_eos else eos_ids
        self.eos_ids = frozenset(eos) - frozenset(params.stop_token_ids)
        self.stop_ids = tuple(dict.fromkeys((*eos, *params.stop_token_ids)))
        self.seed = params.seed
        if params.seed is None and params.temperature > 0:
            self.seed = secrets.randbits(63)
        self.sampling = _sampling_row(params, self.seed, len(prompt))

        self.status = WAITING
        self.output: list[int] = []
        self.logprobs: list[dict[int, float]] | None = None if params.logprobs is None else []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.stats = RequestStats()
        self.trace: list[RoundTrace] | None = [] if params.trace else None
        self._stream = stream
        self._text: list[str] = []
        self._taken_text = self._taken_ids = 0

        self.slot = -1
        self.epoch = 0
        self.pages: list[int] = []
        self.prefilled = 0
        self.known_len = 0
        self.pending = 0
        self.max_pending = 0
        self._arrived = time.perf_counter()
        self._first_token = 0.0

    @property
    def speculates(self) -> bool:
        """Whether the drafter's context is kept for this request."""
        return self.chain or self.budget > 0

    @property
    def prefix(self) -> list[int]:
        """Tokens that prefill runs: the prompt, and when resumed all but the newest token."""
        return self.prompt + self.output[:-1]

    @property
    def num_tokens(self) -> int:
        """Prompt plus output tokens known to the host."""
        return len(self.prompt) + len(self.output)

    def add_first(self, token: int, status: int, logprobs: Sequence[int] = ()) -> None:
        """Take the token that prefill chose."""
        self._first_token = time.perf_counter()
        self.stats.ttft = self._first_token - self._arrived
        self._take([token], status, [logprobs])

    def add_round(self, report: RowReport, stage_seconds: dict[str, float]) -> None:
        """Take one round's tokens, and count the round after trimming."""
        kept = self._take(report.emitted, report.status, report.logprobs)
        stats = self.stats
        stats.rounds += 1
        stats.acceptance_histogram[kept] = stats.acceptance_histogram.get(kept, 0) + 1
        stats.draft_nodes += report.num_nodes - 1
        stats.decode_seconds = time.perf_counter() - self._first_token
        for stage, seconds in stage_seconds.items():
            stats.stage_seconds[stage] = stats.stage_seconds.get(stage, 0.0) + seconds
        if self.trace is not None:
            self.trace.append(_trace(report, kept))

    def finish(self) -> None:
        """End the request; text that was held back is released."""
        self.status = FINISHED
        self.finish_reason = self.finish_reason or "abort"
        self._text.append(self._stream.finish())
        if self._stream.match is not None and self.finish_reason == "length":
            self.finish_reason, self.stop_reason = "stop", self._stream.match.text

    def take(self) -> tuple[str, list[int]]:
        """Text and ids that came since the last call."""
        text = "".join(self._text[self._taken_text :])
        ids = self.output[self._taken_ids :]
        self._taken_text, self._taken_ids = len(self._text), len(self.output)
        return text, ids

    def result(self) -> RequestOutput:
        """The output of a finished request."""
        assert self.finish_reason is not None
        return RequestOutput(
            prompt_token_ids=self.prompt,
            token_ids=self.output,
            text="".join(self._text),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            seed=self.seed,
            logprobs=self.logprobs,
            stats=self.stats,
            trace=self.trace,
        )

    def _take(self, ids: list[int], status: int, logprobs: Sequence[Sequence[int]]) -> int:
        """Append new ids, set the finish fields; returns the number of ids kept."""
        text, match = self._stream.push(ids)
        self._text.append(text)
        if match is not None:
            ids = ids[: match.num_ids]
            self.finish_reason, self.stop_reason = "stop", match.text
        elif status != ROW_RUNNING:
            last = ids[-1]
            stopped = status == ROW_STOPPED
            self.finish_reason = "stop" if stopped else "length"
            self.stop_reason = last if stopped and last not in self.eos_ids else None
        self.output += ids
        if self.logprobs is not None:
            count = self.params.logprobs or 0
            pairs = zip(ids, logprobs, strict=False)
            self.logprobs += [_named(token, entry, count) for token, entry in pairs]
        return len(ids)


LARGEST_COUNT = 1 << 62
"""More tokens than anything has: what a device row can hold of a larger number."""


def _sampling_row(params: SamplingParams, seed: int | None, prompt_len: int) -> SamplingRow:
    """The device row of a request's parameters; what has no effect is left at its default."""
    parts: dict[str, Any] = {}
    level = Level.GREEDY
    if params.logit_bias:
        level |= Level.BIAS
        parts["bias"] = tuple(params.logit_bias.items())
    if params.min_new_tokens:
        level |= Level.MIN_TOKENS
        parts["min_end"] = min(prompt_len + params.min_new_tokens, LARGEST_COUNT)
    penalties = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    if penalties != (1.0, 0.0, 0.0):
        level |= Level.PENALTIES
        parts |= zip(("repetition", "presence", "frequency"), penalties, strict=True)
    if params.logprobs is not None:
        level |= Level.LOGPROBS
    if params.temperature == 0:
        return SamplingRow(level, **parts)
    level |= Level.NOISE
    for name, needed, neutral in (
        ("top_k", Level.TOP_K, 0),
        ("top_p", Level.TOP_P, 1),
        ("min_p", Level.MIN_P, 0),
    ):
        if getattr(params, name) != neutral:
            level |= needed
            parts[name] = min(getattr(params, name), LARGEST_COUNT)
    assert seed is not None
    return SamplingRow(level, seed, params.temperature, **parts)


def _named(token: int, entry: Sequence[int], count: int) -> dict[int, float]:
    """A token's logprobs by id: its own, then the `count` best; see `LOGPROB_WIDTH`."""
    bits, ids = entry[: 1 + count], entry[1 + TOP_LOGPROBS : 1 + TOP_LOGPROBS + count]
    own, *best = struct.unpack(f"{len(bits)}f", struct.pack(f"{len(bits)}i", *bits))
    named = {token: own}
    for other, value in zip(ids, best, strict=True):
        if other >= 0:
            named.setdefault(other, value)
    return named


def _trace(report: RowReport, kept: int) -> RoundTrace:
    scores = struct.unpack(
        f"{report.num_nodes}f", struct.pack(f"{report.num_nodes}i", *report.score_bits)
    )
    return RoundTrace(
        tokens=list(report.tokens),
        parents=[-1, *report.parents[1:]],
        scores=list(scores),
        path=report.path[:kept],
        emitted=report.emitted[:kept],
    )
