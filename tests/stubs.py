"""Drafters that know the answer, half of it or nothing, and what engine outputs are compared to."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fixtures import TINY_EOS, tiny_drafter, tiny_target

from ddtree import Engine
from ddtree.models import registry
from ddtree.parallel import SINGLE, Parallel

Lookup = Callable[[int, int, int], Sequence[int]]
"""(batch row, position of the anchor, anchor token) -> the tokens that truly follow."""

LOGIT = 8.0
"""Draft logit of the best candidate: about 95 % of TINY's probability when it stands alone."""
ABSENT = None
FULL = (0,)
"""ORACLE: the right token always comes first."""
SIBLINGS = (0, 1, 0, 1, 1)
"""MIXED, every token in reach: at three of five positions it is the second choice."""
PARTLY = (0, 1, 0, 0, ABSENT, 1, 0, 2, 0, 1, ABSENT)
"""MIXED with gaps, so that rounds end at all depths."""


class Stub:
    """A drafter that runs the one it wraps, throws its hidden states away, and makes up others.

    Row i of its hidden states ranks the token that comes `ranks[p % len(ranks)]`-th at that
    row's position p: 0 first, 1 second; ABSENT leaves it to chance. Without a lookup all is
    chance (BAD).
    """

    def __init__(
        self,
        target: Any,
        inner: Any,
        lookup: Lookup | None = None,
        ranks: tuple[int | None, ...] = FULL,
    ):
        self.target, self.inner, self.lookup, self.ranks = target, inner, lookup, ranks
        self._generator = torch.Generator().manual_seed(7)
        self._rows = _ranked_rows(getattr(target, "target", target))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __call__(self, embeddings: torch.Tensor, state: Any, kv: torch.Tensor) -> torch.Tensor:
        shape = self.inner(embeddings, state, kv).shape
        hidden = torch.randn(shape, generator=self._generator)
        if self.lookup is None:
            return hidden
        match = (embeddings[:, 0, None] == self.target.embedding).all(-1)
        assert match.any(1).all(), "a row's first embedding is no token's"
        anchors = match.int().argmax(1).tolist()
        for row, (position, anchor) in enumerate(
            zip(state.positions[:, 0].tolist(), anchors, strict=True)
        ):
            following = self.lookup(row, position, anchor)[: shape[1] - 1]
            for depth, token in enumerate(following, start=1):
                rank = self.ranks[(position + depth) % len(self.ranks)]
                if rank is not ABSENT:
                    hidden[row, depth] = self._rows[rank, token]
        return hidden


@functools.cache
def _ranked_rows(target: Any) -> torch.Tensor:
    """Hidden states `[3, V, H]`: given to the head, row [r, v] has token v in place r.

    Each is the shortest vector with the wanted logits for v and the tokens before it; the other
    logits of random weights stay far below.
    """
    head = target.logits(torch.eye(target.config.hidden_size)).T
    vocab = torch.arange(head.shape[0])
    ranked = []
    for rank in range(3):
        chosen = (vocab[:, None] + torch.arange(rank, -1, -1)) % len(vocab)
        wanted = (LOGIT - 0.2 * torch.arange(rank + 1)).expand(len(vocab), -1)
        rows = (torch.linalg.pinv(head[chosen]) @ wanted[:, :, None])[:, :, 0]
        order = target.logits(rows).argsort(dim=1, descending=True)
        assert torch.equal(order[:, rank], vocab), "the head's rows are too alike"
        ranked.append(rows)
    return torch.stack(ranked)


def by_anchor(sequences: Iterable[tuple[int, Sequence[int]]]) -> Lookup:
    """Look continuations up by (position, token) in (prompt length, prompt + output) pairs."""
    known: dict[tuple[int, int], Sequence[int]] = {}
    for start, tokens in sequences:
        for position in range(start, len(tokens)):
            known.setdefault((position, tokens[position]), tokens[position + 1 :])
    return lambda row, position, token: known.get((position, token), ())


def by_row(sequences: Sequence[Sequence[int]]) -> Lookup:
    """Look continuations up by batch row, in one sequence (prompt + output) per row."""

    def lookup(row: int, position: int, token: int) -> Sequence[int]:
        known = sequences[row] if row < len(sequences) else ()
        right = position < len(known) and known[position] == token
        return known[position + 1 :] if right else ()

    return lookup


def install(engine: Engine, lookup: Lookup | None, ranks: tuple[int | None, ...] = FULL) -> None:
    """Let an engine draft with a stub around its own drafter."""
    runner = engine._loop.runner
    inner = runner.machine.drafter
    inner = inner.inner if isinstance(inner, Stub) else inner
    stub = Stub(runner.machine.target, inner, lookup, ranks)
    runner.machine = dataclasses.replace(runner.machine, drafter=stub)


# -- engines --------------------------------------------------------------------------------------

_OPEN: list[Engine] = []


def _built_once(build: Callable[..., Any]) -> Callable[..., Any]:
    """Let all engines share a model: its recorded layers are what takes most time to make."""
    built: dict[tuple[str, ...], Any] = {}

    def shared(folder: Path, *args: Any, parallel: Parallel = SINGLE, **rest: Any) -> Any:
        if parallel.size > 1:
            return build(folder, *args, parallel=parallel, **rest)
        tokens = rest.get("draft_tokens")
        key = (str(folder), str(None if tokens is None else tokens.tolist()))
        key += tuple(str(a) for a in args if isinstance(a, (torch.device, torch.dtype)))
        if key not in built:
            built[key] = build(folder, *args, **rest)
        return built[key]

    return shared


_MODELS = {name: _built_once(getattr(registry, name)) for name in ("build_target", "build_drafter")}


def tiny_engine(architecture: str = "llama", **options: Any) -> Engine:
    """An engine on TINY with its random drafter; `check_engines` looks after it.

    One of several rows launches its steps ahead, as it would on an accelerator.
    """
    options = {"draft": str(tiny_drafter(architecture)), "budget": 16, **options}
    # Ranks share nothing; and a patch made by two threads at once would never be undone.
    shared = {} if "process_group" in options else _MODELS
    with mock.patch.multiple(registry, **shared) if shared else contextlib.nullcontext():
        engine = Engine(str(tiny_target(architecture)), **options)
    engine._loop.ahead = options.get("max_batch_size", 8) > 1
    _OPEN.append(engine)
    return engine


@functools.cache
def tiny_tokenizer() -> Any:
    """A tokenizer for TINY: one character per id, except "<eos>" (99) and "<end>" (100)."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {chr(ord("!") + i): i for i in range(99)} | {"<eos>": 99, "<end>": 100}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="!"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", additional_special_tokens=["<end>"]
    )
    fast.chat_template = "{% for m in messages %}{{ m.role[0] + m.content }}{% endfor %}A"
    return fast


def watch(engine: Engine) -> Engine:
    """Let `check_engines` look after an engine made elsewhere."""
    _OPEN.append(engine)
    return engine


def check_engines() -> None:
    """Assert that no engine holds a page, a slot, a request or an unread step."""
    for engine in [e for e in _OPEN if not e._closed]:
        scheduler = engine._loop.scheduler
        config = scheduler.config
        assert scheduler.pages.free == config.num_pages, "pages are still held"
        assert sorted(scheduler.pages._free) == list(range(2, 2 + config.num_pages))
        assert sorted(scheduler._slots) == list(range(config.max_batch_size))
        assert not scheduler.unfinished and not scheduler._active and not scheduler._waiting
        assert not scheduler._edits and engine._loop._ticket is None


# -- references -----------------------------------------------------------------------------------


@functools.cache
def hf_model(folder: Path) -> Any:
    """The `transformers` model of a checkpoint folder, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.inference_mode()
def hf_generate(folder: Path, prompt: Sequence[int], count: int, **options: Any) -> list[int]:
    """Greedy continuation by `transformers` generate, up to `count` ids."""
    ids = torch.tensor([list(prompt)])
    mask = torch.ones_like(ids)
    out = hf_model(folder).generate(
        ids, attention_mask=mask, max_new_tokens=count, do_sample=False, **options
    )
    return out[0, len(prompt) :].tolist()


@torch.inference_mode()
def hf_logits(folder: Path, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits `[n, V]` after each sequence, by one plain forward."""
    longest = max(map(len, sequences))
    ids = torch.tensor([[*s, *[0] * (longest - len(s))] for s in sequences])
    last = torch.tensor([len(s) - 1 for s in sequences])
    return hf_model(folder)(ids).logits[torch.arange(len(sequences)), last]


KNOWN = 30
"""Tokens of a case's answer, unless an EOS id ends it."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A prompt, and what transformers generate makes of it."""

    prompt: list[int]
    answer: list[int]


@functools.cache
def cases(architecture: str = "llama") -> list[Case]:
    """Ten cases on TINY that never have the same token at the same position with another future.

    So a stub's lookup by (position, token) is exact. At least two of them end with an EOS id.
    """
    generator = torch.Generator().manual_seed(3)
    picked: list[Case] = []
    futures: dict[tuple[int, int], tuple[int, ...]] = {}
    ended = 0
    while len(picked) < 10:
        size = int(torch.randint(2, 44, (), generator=generator))
        prompt = torch.randint(0, 98, (size,), generator=generator).tolist()
        answer = hf_generate(tiny_target(architecture), prompt, KNOWN)
        ends = answer[-1] in TINY_EOS
        spots = {(size + i, token): tuple(answer[i:]) for i, token in enumerate(answer)}
        clash = any(futures.get(spot, future) != future for spot, future in spots.items())
        if clash or (ends and len(answer) < 3) or (len(picked) >= 8 and not ends and ended < 2):
            continue
        ended += ends
        futures |= spots
        picked.append(Case(prompt, answer))
    return picked


def known(architecture: str = "llama") -> Lookup:
    """What the stubs know of all cases."""
    return by_anchor([(len(c.prompt), c.prompt + c.answer) for c in cases(architecture)])


class Agreement:
    """Compares outputs token for token, and keeps account of near-ties.

    Two runs may part only where the two best logits are closer than 1e-4: then either token is
    right, and what follows is not comparable. More than one such place in 1000 tokens fails.
    """

    GAP, SHARE = 1e-4, 1e-3

    def __init__(self) -> None:
        self.tokens = 0
        self.ties: list[str] = []

    def check(
        self, folder: Path, prompt: Sequence[int], got: list[int], want: list[int], label: str
    ) -> None:
        """Assert that `got` is `want`, up to a near-tie."""
        self.tokens += len(want)
        if got == want:
            return
        at = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), None)
        assert at is not None, f"{label}: {len(got)} tokens instead of {len(want)}"
        best = hf_logits(folder, [[*prompt, *want[:at]]])[0].topk(2)
        gap = float(best.values[0] - best.values[1])
        near = gap < self.GAP and {got[at], want[at]} == set(best.indices.tolist())
        assert near, f"{label}: token {at} is {got[at]}, not {want[at]} (gap {gap:.2e})"
        self.ties.append(f"{label}: token {at}, gap {gap:.1e}")

    def close(self) -> None:
        """Log the near-ties, and assert that they are rare."""
        print(f"\n{len(self.ties)} near-ties in {self.tokens} tokens", *self.ties, sep="\n  ")
        assert len(self.ties) <= self.SHARE * self.tokens
