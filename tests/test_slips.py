"""Slips that a newcomer makes, each answered by an error that names the argument."""

import pytest
from fixtures import tiny_drafter, tiny_target

from ddtree import Engine, SamplingParams, draw_tree
from ddtree.config.options import MAX_BATCH_SIZE
from ddtree.runtime.request import RoundTrace
from ddtree.text import Text

MESSAGE = {"role": "user", "content": "hi"}


class Tokenizer:
    """Just enough of a tokenizer for a chat."""

    all_special_ids: tuple[int, ...] = ()

    def get_chat_template(self, override, tools):
        return "{{ messages }}"

    def apply_chat_template(self, messages, tools, tokenize, **options):
        return "hi"

    def encode(self, text, add_special_tokens=True):
        return [1, 2]

    def decode(self, ids, **options):
        return "x" * len(ids)

    def convert_ids_to_tokens(self, token):
        return "x"


@pytest.fixture(scope="module")
def engine():
    with Engine(tiny_target(), tiny_drafter(), budget=4, tokenizer=Tokenizer()) as engine:
        yield engine


@pytest.mark.parametrize("messages", [MESSAGE, (m for m in [MESSAGE]), "hi", 3, None, [], [3]])
def test_odd_messages(engine, messages):
    with pytest.raises(ValueError, match=r"^messages"):
        engine.chat(messages, SamplingParams(max_new_tokens=2))
    assert len(engine.chat([MESSAGE], SamplingParams(max_new_tokens=2))[0].token_ids) == 2
    assert len(engine.chat([[MESSAGE], [MESSAGE]], SamplingParams(max_new_tokens=2))) == 2


@pytest.mark.parametrize("name", ["max_new_tokens", "temperature", "stop"])
def test_sampling_parameters_are_no_template_options(name):
    with pytest.raises(ValueError, match=f"^{name}: belongs in SamplingParams"):
        Text(Tokenizer()).chat([MESSAGE], **{name: 1})


@pytest.mark.parametrize("name", ["truncation", "max_length", "tokenize"])
def test_tokenizer_options_are_refused(name):
    with pytest.raises(ValueError, match=f"^{name}: not an option"):
        Text(Tokenizer()).chat([MESSAGE], **{name: 1})


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_batch_size", MAX_BATCH_SIZE + 1), ("max_model_len", 1), ("revision", 5)],
)
def test_options_out_of_range(name, value):
    with pytest.raises(ValueError, match=f"^{name}:"):
        Engine(tiny_target(), **{name: value})


def test_a_budget_needs_a_drafter():
    with pytest.raises(ValueError, match=r"^budget: 8 tree nodes need a drafter"):
        Engine(tiny_target(), budget=8)
    with Engine(tiny_target(), budget=0) as plain:
        assert plain.describe()["budget"] == 0


def test_drawing_needs_a_tokenizer_that_decodes():
    trace = RoundTrace([1], [-1], [0.0], [0], [2])
    with pytest.raises(ValueError, match=r"^tokenizer:"):
        draw_tree(trace, "x")
