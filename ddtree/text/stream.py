"""Token ids in, text out: incremental detokenising and stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are not (or not yet) a character."""
WINDOW_CONTEXT, WINDOW_LIMIT = 8, 24
"""Ids that a full decoding window keeps, and ids at which it is full."""


class Vocab:
    """Decodes ids with a `transformers` tokenizer, and knows which ids show and which join."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._maybe_special = frozenset(added) | frozenset(
            getattr(tokenizer, "all_special_ids", ())
        )
        self._kinds: dict[int, tuple[bool, bool, bool]] = {}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of `ids` without any clean-up of spaces."""
        return self._tokenizer.decode(
            list(ids),
            skip_special_tokens=skip_special_tokens,
            clean_up_tokenization_spaces=False,
        )

    def shows(self, token: int, skip_special_tokens: bool) -> bool:
        """Whether the id is more than nothing to the decoder."""
        known, special, _ = self._kind(token)
        return known and not (special and skip_special_tokens)

    def joins(self, token: int) -> bool:
        """Whether it is a byte token (``<0xE2>``): a run of those is decoded as a whole."""
        return self._kind(token)[2]

    def _kind(self, token: int) -> tuple[bool, bool, bool]:
        """(in the vocabulary, special, byte token), looked up once per id."""
        kind = self._kinds.get(token)
        if kind is None:
            try:
                piece = self._tokenizer.convert_ids_to_tokens(token)
            except (IndexError, KeyError):
                piece = None
            # Asked of the decoder itself: the lists of special tokens that a tokenizer keeps
            # are not the ones that its decoder goes by.
            special = token in self._maybe_special and not self.decode([token], True)
            byte = isinstance(piece, str) and len(piece) == 6 and piece[:3] == "<0x"
            kind = self._kinds[token] = (piece is not None, special, byte)
        return kind


class Detokenizer:
    """Turns ids into text as they come; the pieces join to the text of all ids at once.

    A window of the newest ids is decoded, and what it shows beyond what has been returned is new.
    A character whose bytes are still incomplete is held back. A full window drops its older ids:
    UTF-8 finds back to character boundaries within four bytes, and a decoder that treats the first
    id in its own way (a stripped leading space) does so before and after a new id alike.
    """

    def __init__(self, vocab: Vocab, skip_special_tokens: bool = True):
        self._vocab = vocab
        self._skip = skip_special_tokens
        self._pushed = self._earlier = 0
        """Ids pushed in all, and before the last call."""
        self._ids: list[int] = []
        self._closed = 0
        """Ids of the window that no further id joins: all but a run of byte tokens at its end."""
        self._ordinals: list[int] = []
        """For every id of the window: the how-manieth pushed id it is."""
        self._shown = self._before = 0
        """Characters of the window's text that have been returned; the same one call earlier."""
        self._held = 0
        """Characters at the end of the window's text that wait for their missing bytes."""

    def push(self, ids: Iterable[int]) -> str:
        """The text that `ids` complete; amortised O(1) per id."""
        self._slide()
        self._earlier = self._pushed
        for token in ids:
            self._pushed += 1
            if self._vocab.shows(token, self._skip):
                self._ids.append(token)
                self._ordinals.append(self._pushed)
                # One bad byte would change the whole run of byte tokens that it joins.
                if not self._vocab.joins(token):
                    self._closed = len(self._ids)
        text = self._vocab.decode(self._ids[: self._closed], self._skip)
        self._held = int(text.endswith(REPLACEMENT))
        return self._advance(text, len(text) - self._held)

    def flush(self) -> str:
        """The text that was held back, when no more ids come."""
        text = self._vocab.decode(self._ids, self._skip)
        self._earlier, self._held = self._pushed, 0
        return self._advance(text, len(text))

    def ids_until(self, characters: int) -> int:
        """How many of the last push's ids it took to complete so many characters.

        `characters` counts from the start of the text that the last call returned.
        """
        for count in range(1, len(self._ids)):
            text = self._vocab.decode(self._ids[:count], self._skip)
            if len(text.rstrip(REPLACEMENT)) >= self._before + characters:
                return max(0, self._ordinals[count - 1] - self._earlier)
        return self._pushed - self._earlier

    def _advance(self, text: str, stable: int) -> str:
        self._before = self._shown
        self._shown = max(self._shown, stable)
        return text[self._before : self._shown]

    def _slide(self) -> None:
        """Drop the older ids of a full window, unless its end may still change as a whole."""
        if len(self._ids) < WINDOW_LIMIT or self._closed < len(self._ids):
            return
        del self._ids[:-WINDOW_CONTEXT], self._ordinals[:-WINDOW_CONTEXT]
        self._closed = len(self._ids)
        self._shown = len(self._vocab.decode(self._ids, self._skip)) - self._held


@dataclass(frozen=True)
class StopMatch:
    """A stop string that was completed.

    Attributes:
        text: the stop string.
        num_ids: ids of the `push` that found it, up to and including the one that completed it;
            0 when that one came earlier and only its text had to wait.
    """

    text: str
    num_ids: int


class TextStream:
    """One request's ids in, its text out, up to the first stop string.

    The first match is the one whose last character comes first; of several that end with the same
    character, the longest. So it does not depend on how the text is cut into tokens, except that
    a stop string completed by the first `min_ids` ids does not count.
    """

    def __init__(
        self,
        vocab: Vocab | None,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_ids: int = 0,
    ):
        self.match: StopMatch | None = None
        """The stop string that ended the text, once there is one."""
        self._detokenizer = None if vocab is None else Detokenizer(vocab, skip_special_tokens)
        self._stop = tuple(stop)
        self._include = include_stop_str_in_output
        self._early = min_ids
        """Ids still to come that do not complete a stop string."""
        self._late = False
        """Whether an id came that may."""
        self._pending = ""
        """Text that may turn out to be the beginning of a stop string."""

    def push(self, ids: Iterable[int]) -> tuple[str, StopMatch | None]:
        """The text that is certain now, and the stop string if one is complete.

        Ids after the one that completes it are ignored, in this call and later.
        """
        if self._detokenizer is None or self.match:
            return "", self.match
        ids = list(ids)
        early, ids = ids[: self._early], ids[self._early :]
        self._early -= len(early)
        text = self._release(self._pending + self._detokenizer.push(early)) if early else ""
        if ids or not early:
            self._late = self._late or bool(ids)
            new = self._take(self._detokenizer.push(ids), len(early))
            text += new if self.match else self._release(new)
        return text, self.match

    def finish(self) -> str:
        """The text that was held back, when no more ids come; may still set `match`."""
        if self._detokenizer is None or self.match:
            return ""
        text = self._detokenizer.flush()
        text = self._take(text) if self._late else self._pending + text
        self._pending = ""
        return text

    def _take(self, new: str, before: int = 0) -> str:
        """Pending and new text, cut at a stop string; sets `match`.

        before: ids of the same call that came before those of the new text.
        """
        old, text = len(self._pending), self._pending + new
        found = [(text.find(stop, max(0, old + 1 - len(stop))), stop) for stop in self._stop]
        ends = [(at + len(stop), at, stop) for at, stop in found if at >= 0]
        if not ends:
            return text
        end, start, stop = min(ends)
        assert self._detokenizer is not None
        self.match = StopMatch(stop, before + self._detokenizer.ids_until(end - old))
        self._pending = ""
        return text[: end if self._include else start]

    def _release(self, text: str) -> str:
        """What of `text` is no part of a stop string; the rest is pending."""
        self._pending = text
        held = self._possible_stop()
        self._pending = text[len(text) - held :]
        return text[: len(text) - held]

    def _possible_stop(self) -> int:
        """Length of the longest end of the pending text that begins a stop string."""
        text = self._pending
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop):
                return length
        return 0
