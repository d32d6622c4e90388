"""Between text and token ids: prompts, chat templates, streamed text and stop strings."""

from ddtree.text.stream import Detokenizer, StopMatch, TextStream, Vocab
from ddtree.text.tokenizer import Text

__all__ = ["Detokenizer", "StopMatch", "Text", "TextStream", "Vocab"]
