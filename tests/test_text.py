"""Text in and out: prompts, chat, streamed text equal to decoding at once, stop strings."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from ddtree.text import Detokenizer, StopMatch, Text, TextStream, Vocab

# The demo vocabulary has no token for 21 of the bytes: some control characters, planes 4 to 11.
WRITABLE = st.text(
    st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs", "Cc"]) | st.sampled_from("\n\t")
)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


@pytest.fixture(scope="module")
def byte_level(demo_target):
    """The real tokenizer: byte-level BPE with 17 special tokens."""
    return AutoTokenizer.from_pretrained(demo_target)


@pytest.fixture(scope="module")
def sentencepiece():
    """A tokenizer that decodes as Llama 2's does: byte fallback, a leading space stripped."""
    pieces = ["<unk>", "<s>", "</s>", *BYTES, "▁", "▁the", "▁cat", "s", "at", ",", "é", "▁▁▁"]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def decode(tokenizer, ids, skip):
    return tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def cut(ids, cuts):
    """`ids` in consecutive pieces that begin at `cuts`."""
    places = [0, *sorted({c % (len(ids) + 1) for c in cuts}), len(ids)]
    return [ids[a:b] for a, b in itertools.pairwise(places)]


def stream_text(stream, pieces):
    """Deltas of a stream fed with `pieces`, and the match."""
    deltas = []
    for piece in pieces:
        delta, match = stream.push(piece)
        deltas.append(delta)
        if match:
            break
    deltas.append(stream.finish())
    return deltas, stream.match


# -- incremental detokenising ---------------------------------------------------------------------

cuts = st.lists(st.integers(0, 400), max_size=40)


@settings(max_examples=150)
@given(
    text=WRITABLE | st.text(alphabet="é€🙂👩‍👧 \n1\ufffd日ض\u0301"),
    cuts=cuts,
    skip=st.booleans(),
)
def test_deltas_join_to_the_decoded_text(byte_level, text, cuts, skip):
    ids = byte_level.encode(text)
    deltas, _ = stream_text(TextStream(Vocab(byte_level), skip), cut(ids, cuts))
    assert "".join(deltas) == text == decode(byte_level, ids, skip)


@settings(max_examples=150)
@given(
    # The first 400 ids hold the specials, all 256 bytes and short pieces of characters.
    ids=st.lists(st.integers(0, 400) | st.integers(0, 49151), max_size=120),
    cuts=cuts,
    skip=st.booleans(),
)
def test_any_ids_join_to_the_decoded_text(byte_level, ids, cuts, skip):
    deltas, _ = stream_text(TextStream(Vocab(byte_level), skip), cut(ids, cuts))
    assert "".join(deltas) == decode(byte_level, ids, skip)


@settings(max_examples=300)
@given(
    ids=st.lists(
        st.integers(0, 266)
        | st.integers(259, 266)
        | st.sampled_from([3 + b for b in "é€🙂".encode()]),
        max_size=80,
    ),
    cuts=cuts,
    skip=st.booleans(),
)
def test_any_sentencepiece_ids_join_to_the_decoded_text(sentencepiece, ids, cuts, skip):
    deltas, _ = stream_text(TextStream(Vocab(sentencepiece), skip), cut(ids, cuts))
    assert "".join(deltas) == decode(sentencepiece, ids, skip)


@settings(max_examples=100)
@given(text=st.text(alphabet="é€🙂👩‍👧日本ض", min_size=1, max_size=20))
def test_no_delta_shows_part_of_a_character(byte_level, text):
    ids = byte_level.encode(text)
    deltas, _ = stream_text(TextStream(Vocab(byte_level)), [[i] for i in ids])
    assert "\ufffd" not in "".join(deltas[:-1])
    assert deltas[-1] == ""


def test_text_comes_as_soon_as_it_is_certain(byte_level):
    ids = byte_level.encode("Hello world, hello 🙂!")
    stream = TextStream(Vocab(byte_level))
    shown = ""
    for count, token in enumerate(ids, 1):
        shown += stream.push([token])[0]
        assert shown == decode(byte_level, ids[:count], True).rstrip("\ufffd")


def test_an_incomplete_character_comes_out_at_the_end(byte_level):
    ids = byte_level.encode("a🙂")[:-1]
    deltas, _ = stream_text(TextStream(Vocab(byte_level)), [[i] for i in ids])
    assert deltas[-1] == "\ufffd"
    assert "".join(deltas) == decode(byte_level, ids, True)


def test_an_id_beyond_the_vocabulary_is_nothing(byte_level):
    ids = [*byte_level.encode("a"), 49_999, *byte_level.encode("b")]
    deltas, _ = stream_text(TextStream(Vocab(byte_level)), [ids])
    assert "".join(deltas) == "ab"


def test_a_space_survives_a_long_run_of_skipped_ids(sentencepiece):
    the, cat = sentencepiece.convert_tokens_to_ids(["▁the", "▁cat"])
    ids = [the, *[1, 2] * 40, cat]
    deltas, _ = stream_text(TextStream(Vocab(sentencepiece)), [[i] for i in ids])
    assert "".join(deltas) == "the cat" == decode(sentencepiece, ids, True)


class CountingVocab(Vocab):
    """Counts the ids that it decodes."""

    decoded = 0

    def decode(self, ids, skip_special_tokens):
        self.decoded += len(ids)
        return super().decode(ids, skip_special_tokens)


@pytest.mark.parametrize("case", ["text", "bad bytes", "specials", "straddling", "byte run"])
def test_the_work_per_id_does_not_grow(byte_level, sentencepiece, case):
    byte = byte_level.get_vocab()
    ids = {
        "text": byte_level.encode("The cat sat, again. ") * 400,
        "bad bytes": [byte["¬"]] * 2000,
        "specials": [1, 2] * 1000,
        "straddling": [byte["â"], *[byte["Ĥ"], byte["¬"], byte["â"]] * 700],
        "byte run": [3 + 0xE2] * 2000,
    }[case]
    vocab = CountingVocab(sentencepiece if case == "byte run" else byte_level)
    detokenizer = Detokenizer(vocab)
    text = "".join(detokenizer.push([token]) for token in ids) + detokenizer.flush()
    assert text == decode(vocab._tokenizer, ids, True)
    assert vocab.decoded < 40 * len(ids)


# -- stop strings ---------------------------------------------------------------------------------


def first_match(text, stop):
    """By definition: walk the text character by character until a stop string ends there."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            return end, max(ending, key=len)
    return None


@settings(max_examples=300)
@given(
    text=st.text(alphabet="ab é🙂", max_size=60),
    stop=st.lists(st.text(alphabet="ab é🙂", min_size=1, max_size=5), min_size=1, max_size=4),
    cuts=cuts,
    include=st.booleans(),
)
def test_stop_strings_match_their_definition(byte_level, text, stop, cuts, include):
    ids = byte_level.encode(text)
    pieces = cut(ids, cuts)
    stream = TextStream(Vocab(byte_level), True, stop, include)
    deltas, found = [], None
    for index, piece in enumerate(pieces):
        delta, found = stream.push(piece)
        deltas.append(delta)
        if found:
            kept = sum(map(len, pieces[:index])) + found.num_ids
            assert stream.push([ids[0]]) == ("", found)
            break
    deltas.append(stream.finish())

    expected = first_match(text, stop)
    if expected is None:
        assert found is None
        assert "".join(deltas) == text
        return
    end, string = expected
    assert found is not None
    assert found.text == string
    assert "".join(deltas) == text[: end if include else end - len(string)]
    assert string in decode(byte_level, ids[:kept], True)
    assert string not in decode(byte_level, ids[: kept - 1], True)[:end]


@settings(max_examples=100)
@given(text=st.text(alphabet="abc", max_size=40), stop=st.text(alphabet="abc", min_size=1))
def test_text_is_held_back_no_longer_than_needed(byte_level, text, stop):
    stream = TextStream(Vocab(byte_level), True, [stop])
    shown, known = "", ""
    for token in byte_level.encode(text):
        known += byte_level.decode([token])
        delta, match = stream.push([token])
        shown += delta
        if match:
            return
        held = max(n for n in range(len(stop)) if known.endswith(stop[:n]))
        assert shown == known[: len(known) - held]


def test_a_stop_string_over_several_tokens(byte_level):
    ids = byte_level.encode("one two three four")
    assert len(byte_level.encode("o th")) > 1
    stream = TextStream(Vocab(byte_level), True, ["o th", "three"])
    deltas = [stream.push([i]) for i in ids[:3]]
    assert "".join(d for d, _ in deltas) == "one tw"
    assert deltas[-1][1] == StopMatch("o th", 1)


def test_skipped_specials_count_as_ids_but_not_as_text(byte_level):
    ids = [1, *byte_level.encode("ab"), 2, *byte_level.encode("cd")]
    stream = TextStream(Vocab(byte_level), True, ["bc"])
    _, match = stream.push(ids)
    assert match == StopMatch("bc", len(ids))
    stream = TextStream(Vocab(byte_level), False, ["<|im_end|>"])
    assert stream.push(ids) == ("<|im_start|>ab", StopMatch("<|im_end|>", ids.index(2) + 1))


def test_a_stop_string_spelled_in_byte_tokens(sentencepiece):
    euro = [3 + byte for byte in "€".encode()]
    cat = sentencepiece.convert_tokens_to_ids("▁cat")
    stream = TextStream(Vocab(sentencepiece), True, ["€"])
    assert stream.push([cat, *euro, cat, cat]) == ("cat", StopMatch("€", 4))
    stream = TextStream(Vocab(sentencepiece), True, ["€"])
    assert stream.push([cat, *euro]) == ("cat", None)
    assert stream.push([cat]) == ("", StopMatch("€", 0))
    stream = TextStream(Vocab(sentencepiece), True, ["€"])
    stream.push([cat, *euro])
    assert (stream.finish(), stream.match) == ("", StopMatch("€", 0))


# -- prompts and chats ----------------------------------------------------------------------------

QUESTION = [{"role": "user", "content": "What is 12 + 30?\n"}]


@settings(max_examples=100)
@given(text=WRITABLE)
def test_prompts_survive_the_tokenizer(byte_level, text):
    tokenizer = Text(byte_level)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_chat_renders_the_template_once(byte_level):
    ids = Text(byte_level).chat(QUESTION)
    assert decode(byte_level, ids, False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nWhat is 12 + 30?\n<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == byte_level.bos_token_id


def test_chat_adds_no_second_bos(sentencepiece):
    from tokenizers.processors import TemplateProcessing

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(sentencepiece.backend_tokenizer.to_str()),
        bos_token="<s>",
        eos_token="</s>",
    )
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.chat_template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    text = Text(tokenizer)
    assert text.encode("cats").count(1) == 1
    assert text.chat([{"role": "user", "content": "cats"}]).count(1) == 1


def test_chat_passes_options_to_the_template(byte_level):
    template = "{{ tools }}|{{ enable_thinking }}|{{ add_generation_prompt }}"
    text = Text(byte_level)
    ids = text.chat(QUESTION, [{"a": 1}], enable_thinking=False, chat_template=template)
    assert decode(byte_level, ids, False) == "[{'a': 1}]|False|True"
    ids = text.chat(QUESTION, add_generation_prompt=False)
    assert not decode(byte_level, ids, False).endswith("assistant\n")


@pytest.mark.parametrize(
    ("messages", "options", "problem"),
    [
        ("hello", {}, "messages: expected a list"),
        ([], {}, "messages: expected at least one"),
        ([{"content": "x"}], {}, "messages[0]: expected"),
        ([*QUESTION, "x"], {}, "messages[1]: expected"),
        ([{"role": "user"}], {}, "messages: the chat template rejects"),
        ([{"role": "user", "content": "\ud800"}], {}, "messages: not valid Unicode"),
        (QUESTION, {"tools": [{}]}, "tools: "),
        (QUESTION, {"tokenize": False}, "tokenize: "),
    ],
)
def test_bad_chats_are_named(byte_level, messages, options, problem):
    with pytest.raises(ValueError) as caught:
        Text(byte_level).chat(messages, **options)
    assert str(caught.value).startswith(problem)


def test_a_missing_template_is_named(sentencepiece):
    with pytest.raises(ValueError, match=r"^messages: .* no chat template"):
        Text(sentencepiece).chat(QUESTION)


def test_a_prompt_that_is_not_unicode_is_named(byte_level):
    with pytest.raises(ValueError, match=r"^prompts\[1\]: not valid Unicode"):
        Text(byte_level).encode("a\ud800", "prompts[1]")


# -- loading --------------------------------------------------------------------------------------


def test_loading_from_a_folder_or_an_object(demo_target, byte_level):
    ids = byte_level.encode("Hello 123")
    assert Text.load(demo_target).encode("Hello 123") == ids
    assert Text.load(str(demo_target)).encode("Hello 123") == ids
    assert Text.load(byte_level).tokenizer is byte_level


def test_a_folder_without_tokenizer_files(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    text = Text.load(tmp_path)
    assert text.tokenizer is None
    assert text.decode([1, 2]) == ""
    stream = text.stream()
    assert stream.push([1, 2]) == ("", None)
    assert stream.finish() == ""
    for call, name in [
        (lambda: text.encode("x", "prompts[2]"), r"prompts\[2\]"),
        (lambda: text.chat(QUESTION), "messages"),
        (lambda: text.stream(stop=["x"]), "stop"),
    ]:
        with pytest.raises(ValueError, match=f"^{name}: .* needs a tokenizer"):
            call()


@pytest.mark.parametrize("source", [3, object(), "no/such/place"])
def test_what_is_no_tokenizer_is_named(source):
    with pytest.raises(ValueError, match=r"^tokenizer: "):
        Text.load(source)


def test_a_damaged_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"^tokenizer: cannot load"):
        Text.load(tmp_path)


def test_no_code_of_the_folder_is_run(tmp_path, byte_level):
    byte_level.save_pretrained(tmp_path)
    marker = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(marker)!r}, 'w')")
    config = tmp_path / "tokenizer_config.json"
    config.write_text(
        config.read_text().replace("{", '{"auto_map": {"AutoTokenizer": [null, "evil.E"]},', 1)
    )
    start = time.monotonic()
    try:
        Text.load(tmp_path)
    except ValueError as error:
        assert str(error).startswith("tokenizer: ")
    assert not marker.exists()
    assert time.monotonic() - start < 10  # nobody was asked for permission


@pytest.mark.parametrize("stop", [[""], "abc"])
def test_bad_stop_strings_are_named(byte_level, stop):
    with pytest.raises(ValueError, match=r"^stop: "):
        Text(byte_level).stream(stop=stop)
