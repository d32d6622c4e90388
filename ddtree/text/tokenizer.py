"""Prompts and conversations to token ids, with the target's own tokenizer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddtree.config import SamplingParams
from ddtree.text.stream import TextStream, Vocab

TOKENIZER_OPTIONS = frozenset(
    [
        "tokenize",
        "return_dict",
        "return_tensors",
        "conversation",
        "truncation",
        "max_length",
        "padding",
    ]
)
"""Options of `apply_chat_template` that are not the template's."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)


class Text:
    """A target's tokenizer as the engine uses it.

    Args:
        tokenizer: a `transformers` tokenizer, or None for a target without one: then token
            prompts work, all text is "" and what needs a tokenizer raises `ValueError`.
    """

    def __init__(self, tokenizer: Any = None):
        self.tokenizer = tokenizer
        self._vocab = None if tokenizer is None else Vocab(tokenizer)

    @classmethod
    def load(cls, source: Any, local_files_only: bool = False) -> Text:
        """The tokenizer of a folder, of a hub id, or a tokenizer object itself.

        A folder without tokenizer files gives a `Text` without a tokenizer. Nothing from the
        folder is executed.

        Raises:
            ValueError: the tokenizer cannot be loaded, or the object is none.
        """
        if not isinstance(source, (str, os.PathLike)):
            if not all(callable(getattr(source, name, None)) for name in ("encode", "decode")):
                raise ValueError(
                    "tokenizer: expected a folder, a hub id or a transformers tokenizer, "
                    f"got {type(source).__name__}"
                )
            return cls(source)
        folder = Path(source)
        if folder.is_dir() and not any((folder / name).is_file() for name in TOKENIZER_FILES):
            return cls(None)
        from transformers import AutoTokenizer

        try:
            return cls(
                AutoTokenizer.from_pretrained(
                    str(source), trust_remote_code=False, local_files_only=local_files_only
                )
            )
        # Whatever a damaged tokenizer file sets off, the user's question is "which argument?".
        except Exception as error:
            raise ValueError(f"tokenizer: cannot load one from {source}: {error}") from error

    def encode(self, prompt: str, name: str = "prompts") -> list[int]:
        """Token ids of a prompt, with the special tokens that the tokenizer adds by itself.

        Raises:
            ValueError: no tokenizer, or text that has no UTF-8 form; begins with `name`.
        """
        self._require(name, "a prompt given as text")
        _check_unicode(name, prompt)
        return list(self.tokenizer.encode(prompt))

    def chat(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None = None,
        **chat_template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation, ready for the answer, through the tokenizer's template.

        The template writes all special tokens itself, so none are added (no doubled BOS).

        Args:
            messages: ``[{"role": "user", "content": "..."}, ...]``.
            tools: passed to the template; refused when it has no place for them.
            chat_template_kwargs: passed to the template, e.g. ``enable_thinking=False``.

        Raises:
            ValueError: no tokenizer or template, or messages that the template cannot render.
        """
        self._require("messages", "a conversation")
        _check_messages(messages)
        for name in chat_template_kwargs:
            if name in TOKENIZER_OPTIONS:
                raise ValueError(f"{name}: not an option of a chat; the engine needs plain ids")
            if name in SamplingParams.__dataclass_fields__:
                raise ValueError(f"{name}: belongs in SamplingParams, not in the chat template")
        template = self._template(tools, chat_template_kwargs.get("chat_template"))
        if tools and "tools" not in template:
            raise ValueError("tools: this model's chat template has no place for tools")
        continued = bool(chat_template_kwargs.get("continue_final_message"))
        options = {"add_generation_prompt": not continued, **chat_template_kwargs}
        try:
            prompt = self.tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, **options
            )
        # A template is a program of the checkpoint's: any error in it is about its input.
        except Exception as error:
            raise ValueError(f"messages: the chat template rejects them: {error}") from error
        _check_unicode("messages", prompt)
        return list(self.tokenizer.encode(prompt, add_special_tokens=False))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`, character for character ("" without a tokenizer)."""
        return "" if self._vocab is None else self._vocab.decode(ids, skip_special_tokens)

    def stream(
        self,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_ids: int = 0,
    ) -> TextStream:
        """A new `TextStream` for one request.

        Raises:
            ValueError: stop strings without a tokenizer, or an empty one.
        """
        if stop:
            self._require("stop", "a stop string")
            if isinstance(stop, str) or "" in stop:
                raise ValueError(f"stop: expected a list of non-empty strings, got {stop!r}")
        return TextStream(
            self._vocab, skip_special_tokens, stop, include_stop_str_in_output, min_ids
        )

    def _require(self, name: str, what: str) -> None:
        if self.tokenizer is None:
            raise ValueError(
                f"{name}: {what} needs a tokenizer and the target folder has none; "
                "give token ids, or the engine a tokenizer"
            )

    def _template(self, tools: Any, override: str | None) -> str:
        """The text of the template that will be used."""
        try:
            return str(self.tokenizer.get_chat_template(override, tools))
        except (AttributeError, ValueError) as error:
            raise ValueError(
                "messages: the target's tokenizer has no chat template; give the engine a "
                "prompt, or a tokenizer that has one"
            ) from error


def _check_messages(messages: Any) -> None:
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence):
        raise ValueError(f"messages: expected a list of messages, got {type(messages).__name__}")
    if not messages:
        raise ValueError("messages: expected at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(
                f'messages[{index}]: expected {{"role": ..., "content": ...}}, got {message!r}'
            )


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"{name}: not valid Unicode text: {error}") from error
