"""Plans of the drafter trainer's corpora, and prompts and shapes that do not fit the target."""

from __future__ import annotations

import json
from types import SimpleNamespace

import fixtures
import pytest
from stubs import tiny_tokenizer
from test_train_drafter import random_sequences
from test_train_drafter_data import ask, chat_target, run
from train_drafter import data, generate, plan, prompts
from train_drafter.layout import new_config

# -- plans ------------------------------------------------------------------------------------


def test_a_corpus_begun_with_something_else_is_refused(tmp_path, capsys):
    assert ask(tmp_path, "--minutes", "0.0001") == 0
    other = tmp_path / "other.txt"
    other.write_text("anotherprompt")
    for options, target, flag in (
        (("--prompts", other), None, "--prompts or --compose"),
        (("--compose", 50), None, "--prompts or --compose"),
        (("--self-instruct", 2), None, "--self-instruct"),
        (("--seed", 1), None, "--seed"),
        (("--shard-prompts", 20), None, "--shard-prompts"),
        (("--max-new-tokens", 25), None, "--max-new-tokens"),
        ((), chat_target(5), "--target"),
    ):
        assert ask(tmp_path, *options, target=target) == 1
        err = capsys.readouterr().err
        assert f"corpus was begun with another {flag} (" in err and "another --name" in err
        assert [p.stem for p in data.shard_paths(tmp_path)] == ["corpus-0000"]
    assert ask(tmp_path, "--minutes", "9", "--batch-size", "2") == 0
    assert [p.stem for p in data.shard_paths(tmp_path)] == ["corpus-0000", "corpus-0001"]


def test_a_plan_is_kept_only_once_all_its_prompts_fit(tmp_path, capsys):
    asked = tmp_path / "prompts.txt"
    asked.write_text(f"short\n{'long' * 130}\n{'long' * 200}\n")
    assert ask(tmp_path) == 1
    err = capsys.readouterr().err
    assert "prompts: 'longlong" in err and "has 522 tokens; a prompt must have from 1 to 511" in err
    assert "and 1 more do not fit" in err
    asked.write_text("short\nalsoshort\n")
    assert ask(tmp_path) == 0
    assert data.shard_paths(tmp_path)


def test_a_plan_without_prompts_is_refused(tmp_path):
    engine = SimpleNamespace(generate=lambda ids, params, progress: [], tokenizer=tiny_tokenizer())
    options = generate.CorpusOptions("c", self_instruct=2)
    with pytest.raises(ValueError, match="no prompts to answer"):
        generate.make_corpus(engine, [], tmp_path, options, print)
    assert not (tmp_path / "corpus" / "c.json").exists()


def test_self_written_prompts_that_do_not_fit_are_left_out(tmp_path):
    texts = ["tenletters", "twentyletterstwenty!", "tenletters"]
    engine = SimpleNamespace(
        generate=lambda ids, params, progress: [
            SimpleNamespace(text=text, finish_reason="stop") for text in texts
        ],
        tokenizer=tiny_tokenizer(),
        max_model_len=16,
    )
    options = generate.CorpusOptions("c", self_instruct=3)
    made = generate._plan(engine, ["a"], tmp_path, options, 7)
    assert [prompt for prompt, _ in made] == ["a", "tenletters"]
    assert generate._plan(engine, ["a"], tmp_path, options, 7) == made


@pytest.mark.parametrize(
    "content, why",
    [
        (b'[["a prompt", 0.0]]', "is of an older version"),
        (b"[]", "is of an older version"),
        (b"null", "is damaged"),
        (b"[[", "is damaged"),
        (b"\xff\xfe", "is damaged"),
        (b'{"made_from": {}, "plan": []}', "is damaged"),
        (b'{"made_from": %s, "plan": [["a"]]}', "is damaged"),
    ],
)
def test_a_plan_that_cannot_be_read_is_named(tmp_path, content, why):
    path = tmp_path / "c.json"
    made_from = dict.fromkeys(plan.FLAGS, 1)
    path.write_bytes(content.replace(b"%s", json.dumps(made_from).encode()))
    with pytest.raises(ValueError, match=why) as caught:
        plan.read_plan(path, made_from)
    assert str(path) in str(caught.value) and "choose another --name" in str(caught.value)


def test_shards_of_unknown_origin_are_not_gone_on_with(tmp_path, capsys):
    data.write_shard(tmp_path / "corpus" / "corpus-0000.npz", random_sequences(2))
    assert ask(tmp_path) == 1
    assert "shards named corpus without a plan corpus.json" in capsys.readouterr().err
    data.write_shard(tmp_path / "corpus" / "new-more-0000.npz", random_sequences(2))
    assert ask(tmp_path, "--name", "new") == 0
    source = tmp_path / "new.npz"
    data.write_shard(source, random_sequences(20))
    assert run(tmp_path, "corpus", "--import-file", source) == 1
    assert "other shards named new" in capsys.readouterr().err


# -- prompts and shapes -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "content, why",
    [
        ("grün".encode("latin-1"), "must be UTF-8 text"),
        ("green".encode("utf-16"), "must be UTF-8 text"),
        ("green".encode("utf-16-le"), "must be UTF-8 text"),
        (b"", "has no prompts"),
        (b"# only a comment\n\n", "has no prompts"),
    ],
)
@pytest.mark.parametrize("command", ["corpus", "calibrate", "evaluate"])
def test_a_prompts_file_that_cannot_be_used_is_named(tmp_path, capsys, command, content, why):
    path = tmp_path / "asked.txt"
    path.write_bytes(content)
    options = () if command == "corpus" else ("--draft", fixtures.tiny_drafter())
    assert run(tmp_path, command, "--prompts", path, *options) == 1
    assert f"error: prompts: {path} {why}" in capsys.readouterr().err


def test_prompts_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "asked.txt"
    path.write_text("# a comment\ngrün\n", encoding="utf-8-sig")
    assert prompts.read_prompts(path) == ["grün"]


def test_no_fewer_than_no_prompts_can_be_composed():
    assert prompts.compose(0) == []
    with pytest.raises(ValueError, match="can be composed, -1 were asked for"):
        prompts.compose(-1)


def test_a_target_without_tokenizer_or_template_cannot_write_prompts(tmp_path, capsys):
    assert run(tmp_path, "corpus", "--self-instruct", 2, target=fixtures.tiny_target()) == 1
    assert "no tokenizer" in capsys.readouterr().err
    for template in (None, "", "{% for m in messages %}{{ m.content }}{% endfor %}", "fixed"):
        tokenizer = SimpleNamespace(
            chat_template=template,
            apply_chat_template=lambda messages, text=template, **_: (
                messages[0]["content"] if text and "for" in text else text
            ),
        )
        with pytest.raises(ValueError, match=r"self-instruct: the target must have a chat templ"):
            generate.user_header(SimpleNamespace(tokenizer=tokenizer))


@pytest.mark.parametrize("command", ["features", "train"])
@pytest.mark.parametrize(
    "options, why",
    [
        (("--taps", 99), "target_layer_ids must be layers of the target, 0..3"),
        (("--mask-token", 101), "mask_token_id must be in the target's vocabulary, 0..100"),
        (("--init", "target", "--layers", 9), "layers: with --init target at most"),
    ],
)
def test_a_shape_that_does_not_fit_the_target_is_refused(tmp_path, capsys, command, options, why):
    data.write_shard(tmp_path / "corpus" / "a.npz", random_sequences(2))
    limit = ("--steps", 1) if command == "train" else ()
    assert run(tmp_path, command, *limit, *options) == 1
    assert why in capsys.readouterr().err
    assert not (tmp_path / "runs").exists() and not (tmp_path / "features").exists()


def test_an_mlp_of_no_width_is_not_the_targets():
    with pytest.raises(ValueError, match="intermediate_size"):
        new_config(chat_target(), intermediate_size=0)


@pytest.mark.parametrize("content", ["{", "[]", '{"architectures": ["LlamaForCausalLM"]}'])
def test_a_broken_config_of_the_target_is_named(tmp_path, capsys, content):
    target = fixtures.new_folder()
    (target / "config.json").write_text(content)
    assert run(tmp_path, "train", "--steps", 1, target=target) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: target") or str(target) in err
    assert "config.json" in err or "model_type" in err
