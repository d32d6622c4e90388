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


def test_enormous_counts_disturb_nobody(engine):
    """What no vocabulary and no output reaches is as good as no limit."""
    prompt, usual = [5, 9, 22], {"temperature": 1.0, "seed": 1, "ignore_eos": True}
    (want,) = engine.generate(prompt, SamplingParams(max_new_tokens=12, **usual))
    stream = engine.stream(prompt, SamplingParams(max_new_tokens=12, **usual))
    got = list(next(stream).token_ids)
    huge = SamplingParams(max_new_tokens=5, top_k=2**63, **usual)
    assert engine.generate(prompt, huge)[0].token_ids == want.token_ids[:5]
    long = SamplingParams(max_new_tokens=2**63, min_new_tokens=2**63 - 1, temperature=0.0)
    (output,) = engine.generate(prompt, long)
    assert len(prompt + output.token_ids) == engine.max_model_len
    assert got + [token for delta in stream for token in delta.token_ids] == want.token_ids


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-5])
def test_the_smallest_temperatures_are_greedy(temperature):
    prompt, params = [5, 9, 22], SamplingParams(max_new_tokens=12, ignore_eos=True)
    cold = SamplingParams(max_new_tokens=12, ignore_eos=True, temperature=temperature, seed=3)
    for verify in ("match", "rejection"):
        with Engine(tiny_target(), tiny_drafter(), budget=7, verify=verify) as engine:
            (want,), (got,) = engine.generate(prompt, params), engine.generate(prompt, cold)
            assert got.token_ids == want.token_ids


def test_a_pool_without_room_for_a_draft_names_the_budget():
    options = {"budget": 64, "max_batch_size": 2, "num_pages": 9, "page_size": 8}
    with Engine(tiny_target(), tiny_drafter(), max_model_len=64, **options) as engine:
        with pytest.raises(ValueError, match=r"^num_pages: .*draft.*budget"):
            engine.generate([5, 9, 22], SamplingParams(max_new_tokens=20))
        params = SamplingParams(max_new_tokens=20, budget=16)
        assert len(engine.generate([5, 9, 22], params)[0].token_ids) > 0
