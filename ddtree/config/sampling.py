"""What one request asks for, checked when it is written down."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any


@dataclass(frozen=True)
class SamplingParams:
    """How one request is to be decoded; every field is checked on construction.

    Attributes:
        max_new_tokens: at most so many tokens come back; 0 gives none.
        temperature: 0 is greedy decoding; at most 1000.
        top_k: sample from the k most likely tokens only; 0 from all.
        top_p: sample from the fewest most likely tokens with this share of the probability, taken
            after top_k.
        min_p: leave out tokens less than this times as likely as the most likely one.
        seed: makes sampled output repeatable, whatever runs beside it: the same with every kind of
            speculation and every budget, and for equal prompts. None: one is drawn for each
            request, and reported in the output.
        stop: text that ends the request, cut from the output unless `include_stop_str_in_output`.
        stop_token_ids: ids that end the request, beside the model's own end-of-sequence ids.
        ignore_eos: do not end at the model's own end-of-sequence ids.
        min_new_tokens: before so many tokens, nothing ends the request: end-of-sequence and stop
            ids are not chosen, and stop strings not looked for. Ignored end-of-sequence ids may be.
        presence_penalty, frequency_penalty: what the logit of an output token is lowered by, once
            and per occurrence; -2 to 2.
        repetition_penalty: divides positive logits of prompt and output tokens and multiplies
            negative ones; 0.01 to 100, 1 is none.
        logit_bias: token id -> number from -100 to 100 that is added to its logit.
        logprobs: report each emitted token's log-probability, and those of so many most likely
            ones (0 to 20), under the target's distribution before any of the above.
        speculation: ``"tree"``, ``"chain"`` (one candidate per depth) or ``"off"`` (plain
            decoding). The tokens are the same.
        budget: most tree nodes below the root, of those that the engine's own would have; None: all
            of those; 0 is plain decoding.
        trace: record the tree and the accepted path of every round.

    Raises:
        ValueError: a field has the wrong type or an impossible value; the message begins with the
            field's name.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    speculation: str = "tree"
    budget: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    trace: bool = False

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "max_new_tokens": _integer("max_new_tokens", self.max_new_tokens, 0),
            "temperature": _number("temperature", self.temperature, 0, 1000),
            "top_k": _integer("top_k", self.top_k, 0),
            "top_p": _number("top_p", self.top_p, 0, 1, above=True),
            "min_p": _number("min_p", self.min_p, 0, 1),
            "stop": _strings("stop", self.stop),
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "min_new_tokens": _integer("min_new_tokens", self.min_new_tokens, 0),
            "presence_penalty": _number("presence_penalty", self.presence_penalty, -2, 2),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, -2, 2),
            "repetition_penalty": _number("repetition_penalty", self.repetition_penalty, 0.01, 100),
        }
        if self.seed is not None:
            checked["seed"] = _integer("seed", self.seed, -(2**63), 2**63 - 1)
        if self.logit_bias is not None:
            checked["logit_bias"] = _logit_bias(self.logit_bias)
        if self.logprobs is not None:
            checked["logprobs"] = _integer("logprobs", self.logprobs, 0, 20)
        if self.budget is not None:
            checked["budget"] = _integer("budget", self.budget, 0)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"min_new_tokens: {self.min_new_tokens} is more than max_new_tokens, "
                f"{self.max_new_tokens}"
            )
        if self.speculation not in ("tree", "chain", "off"):
            raise ValueError(
                f'speculation: expected "tree", "chain" or "off", got {self.speculation!r}'
            )
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "trace"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: expected True or False, got {getattr(self, name)!r}")


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    if not _is_int(value):
        raise ValueError(f"{name}: expected an integer, got {value!r}")
    if value < low or (high is not None and value > high):
        upper = "" if high is None else f" and <= {high}"
        raise ValueError(f"{name}: expected an integer >= {low}{upper}, got {value}")
    return int(value)


def _number(
    name: str, value: Any, low: float, high: float | None = None, above: bool = False
) -> float:
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:
        number = math.inf
    if isinstance(value, bool) or not math.isfinite(number):
        raise ValueError(f"{name}: expected a finite number, got {value!r}")
    value = number
    if value < low or (above and value == low) or (high is not None and value > high):
        lower = f"{'>' if above else '>='} {low}"
        upper = "" if high is None else f" and <= {high}"
        raise ValueError(f"{name}: expected a number {lower}{upper}, got {value}")
    return value


def _strings(name: str, values: Any) -> tuple[str, ...]:
    values = (values,) if isinstance(values, str) else values
    if not isinstance(values, Sequence) or not all(isinstance(text, str) for text in values):
        raise ValueError(f"{name}: expected a string or a sequence of strings, got {values!r}")
    if "" in values:
        raise ValueError(f"{name}: an empty string would match at once; leave it out")
    return tuple(values)


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise ValueError(f"{name}: expected a sequence of token ids, got {values!r}")
    return tuple(_integer(name, value, 0) for value in values)


def _logit_bias(values: Any) -> dict[int, float]:
    if not isinstance(values, Mapping):
        raise ValueError(f"logit_bias: expected a mapping of token id to number, got {values!r}")
    return {
        _integer("logit_bias", token, 0): _number("logit_bias", bias, -100, 100)
        for token, bias in values.items()
    }
