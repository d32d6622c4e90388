"""What `Engine` is told, and what a request may ask of it: checks that need no model code."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from ddtree.config.sampling import SamplingParams

MAX_STOP_IDS = 32
"""Stop token ids (EOS included) that one request may have."""

MAX_BIASES = 512
"""Entries of a request's `logit_bias`."""

MAX_BATCH_SIZE = 1024
"""Requests that may run at the same time."""

Prompt = str | list[int]


def check_timeout(timeout: Any) -> None:
    """Check the `Engine` option that the ranks' group needs first.

    Raises:
        ValueError: it is no number of seconds.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ValueError(f"timeout: expected a number of seconds > 0, got {timeout!r}")


def check_options(options: dict[str, Any], ranks: int = 1) -> None:
    """Check the `Engine` options that need no look at the models.

    Raises:
        ValueError: the message begins with the option's name.
    """
    for name in ("max_batch_size", "prefill_chunk", "page_size"):
        _positive(name, options[name])
    if options["max_batch_size"] > MAX_BATCH_SIZE:
        raise ValueError(
            f"max_batch_size: at most {MAX_BATCH_SIZE}, got {options['max_batch_size']}"
        )
    if options["max_model_len"] == 1:
        raise ValueError("max_model_len: at least 2, a prompt token and a new one, got 1")
    if options["revision"] is not None and not isinstance(options["revision"], str):
        raise ValueError(f"revision: expected a string or None, got {options['revision']!r}")
    for name in ("max_model_len", "num_pages"):
        if options[name] is not None:
            _positive(name, options[name])
    page_size = options["page_size"]
    if page_size & (page_size - 1):
        raise ValueError(f"page_size: expected a power of two, got {page_size}")
    fraction = options["memory_fraction"]
    if (
        isinstance(fraction, bool)
        or not isinstance(fraction, (int, float))
        or not 0 < fraction <= 1
    ):
        raise ValueError(f"memory_fraction: expected a number in (0, 1], got {fraction!r}")
    for name in ("cuda_graphs", "local_files_only", "coupling"):
        if not isinstance(options[name], bool):
            raise ValueError(f"{name}: expected True or False, got {options[name]!r}")
    if options["verify"] not in ("match", "rejection"):
        raise ValueError(f'verify: expected "match" or "rejection", got {options["verify"]!r}')
    if options["verify"] == "rejection" and ranks > 1:
        raise ValueError(f'verify: "rejection" runs on one rank only, here are {ranks}')


def check_prompt(name: str, ids: Sequence[Any], vocab_size: int, max_model_len: int) -> list[int]:
    """Check a prompt's token ids, and return them as plain integers.

    Raises:
        ValueError: it is empty, too long, or has an id outside the vocabulary.
    """
    if not ids:
        raise ValueError(f"{name}: is empty; at least one token is needed")
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise ValueError(f"{name}: expected a string or token ids, found {token!r}")
        if not 0 <= int(token) < vocab_size:
            raise ValueError(f"{name}: token id {token} is outside 0..{vocab_size - 1}")
    if len(ids) >= max_model_len:
        raise ValueError(
            f"{name}: has {len(ids)} tokens; with max_model_len {max_model_len} "
            f"a prompt may have at most {max_model_len - 1}"
        )
    return [int(token) for token in ids]


def check_request(
    params: SamplingParams, num_eos: int, vocab_size: int, budget: int, has_drafter: bool
) -> None:
    """Check parameters against the engine: its vocabulary, its budget, its drafter.

    Raises:
        ValueError: the message begins with the parameter's name.
    """
    for token in params.stop_token_ids:
        if token >= vocab_size:
            raise ValueError(f"stop_token_ids: {token} is outside 0..{vocab_size - 1}")
    room = MAX_STOP_IDS - num_eos
    if len(params.stop_token_ids) > room:
        raise ValueError(
            f"stop_token_ids: at most {room} are possible, got {len(params.stop_token_ids)}"
        )
    bias = params.logit_bias or {}
    if bias and max(bias) >= vocab_size:
        raise ValueError(f"logit_bias: {max(bias)} is outside 0..{vocab_size - 1}")
    if len(bias) > MAX_BIASES:
        raise ValueError(f"logit_bias: at most {MAX_BIASES} entries are possible, got {len(bias)}")
    if params.speculation == "chain" and not has_drafter:
        raise ValueError('speculation: "chain" needs a drafter; construct Engine(draft=...)')
    if params.budget is not None and params.budget > budget:
        raise ValueError(
            f"budget: at most the engine's own budget, {budget}, got {params.budget}; "
            "construct Engine(draft=..., budget=...) with more"
        )


def split_prompts(prompts: Any) -> tuple[list[Prompt], list[str]]:
    """Tell one prompt from several: returns the prompts, and a name for each in errors.

    Raises:
        ValueError: it is neither a string, a flat list of ids, nor a list of those.
    """
    if isinstance(prompts, str):
        return [prompts], ["prompts"]
    if not _is_list(prompts):
        raise ValueError(
            "prompts: expected a string, a list of token ids, or a list of those, "
            f"got {type(prompts).__name__}"
        )
    if prompts and not any(isinstance(p, Sequence) for p in prompts):
        return [list(prompts)], ["prompts"]
    names = [f"prompts[{i}]" for i in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        if not isinstance(prompt, str) and not _is_list(prompt):
            raise ValueError(f"{name}: expected a string or token ids, got {prompt!r}")
    return [p if isinstance(p, str) else list(p) for p in prompts], names


def single_prompt(prompt: Any) -> Prompt:
    """The one prompt that `prompt` is.

    Raises:
        ValueError: it is neither a string nor a flat list of ids.
    """
    batch, _ = split_prompts(prompt)
    if len(batch) != 1 or (not isinstance(prompt, str) and list(prompt) == batch):
        raise ValueError("prompt: expected one string or one flat list of token ids")
    return batch[0]


def split_params(params: Any, count: int) -> list[SamplingParams]:
    """One `SamplingParams` per prompt, from None, one for all, or one each.

    Raises:
        ValueError: wrong type, or the wrong number of them.
    """
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise ValueError(f"params: expected SamplingParams or a list of them, got {params!r}")
    if len(params) != count:
        raise ValueError(f"params: there are {count} prompts, but {len(params)} SamplingParams")
    return list(params)


def _is_list(value: Any) -> bool:
    """Whether it may be a list of ids or of prompts; bytes are neither, though a sequence."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _positive(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: expected a whole number >= 1, got {value!r}")
