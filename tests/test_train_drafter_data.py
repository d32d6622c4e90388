"""Corpus shards and features of the drafter trainer: damaged, outdated, or of another target."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import fixtures
import numpy as np
import pytest
from stubs import tiny_tokenizer
from test_train_drafter import TAPS, make_shards, random_sequences
from train_drafter import batches, data, features
from train_drafter.__main__ import main
from train_drafter.target import load_target_weights

LAYOUT = ("--taps", *map(str, TAPS), "--mask-token", str(fixtures.TINY_MASK))


@functools.cache
def chat_target(seed: int = 0) -> Path:
    """TINY, or another of its shape, with a tokenizer and a chat template."""
    folder = fixtures.make_target(seed=seed)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def mark_of(target: Path) -> int:
    return load_target_weights(target).fingerprint


def run(work: Path, command: str, *options: object, target: Path | None = None) -> int:
    common = ["--target", str(target or chat_target()), "--work", str(work)]
    return main([command, *common, *map(str, options)])


def ask(work: Path, *options: object, target: Path | None = None) -> int:
    """Answer a few prompts of `prompts.txt`, which is made if it is not there."""
    path = work / "prompts.txt"
    if not path.exists():
        path.write_text("\n".join(f"what{i}is{i * 7}" for i in range(6)))
    given = ("--prompts", path, "--shard-prompts", 3, "--max-new-tokens", 24)
    return run(work, "corpus", *given, *options, target=target)


def store_of(work: Path, target: Path, said: list[str]) -> list[str]:
    return batches.Store(work, TAPS, mark_of(target), said.append).refresh()


# -- features ---------------------------------------------------------------------------------


def test_features_of_an_older_corpus_are_made_again(tmp_path, capsys):
    shard = tmp_path / "corpus" / "a.npz"
    sequences = random_sequences(4)
    joined = np.concatenate([s.tokens for s in sequences])
    moved = [data.Sequence(s.tokens, s.start, s.temperature) for s in sequences]
    moved[1] = data.Sequence(np.append(moved[1].tokens, moved[2].tokens[0]), 6, 1.0)
    moved[2] = data.Sequence(moved[2].tokens[1:], 6, 0.0)
    assert np.array_equal(joined, np.concatenate([s.tokens for s in moved]))
    for other in (random_sequences(4, seed=1), sequences[:3], moved):
        data.write_shard(shard, sequences)
        assert run(tmp_path, "features", *LAYOUT) == 0
        data.write_shard(shard, other)
        said: list[str] = []
        capsys.readouterr()
        assert store_of(tmp_path, chat_target(), said) == []
        assert "a.bin was made from other tokens" in said[0] and "run `features` again" in said[0]
        assert run(tmp_path, "features", *LAYOUT) == 0
        assert "features: 1 shards made" in capsys.readouterr().out
        assert store_of(tmp_path, chat_target(), said) == ["a"]
    assert run(tmp_path, "features", *LAYOUT) == 0
    assert "features: 0 shards made" in capsys.readouterr().out


@pytest.mark.parametrize(
    "damage", [b"[]", b"null", b"7", b'{"rows": Infinity}', b'{"taps": 3}', "no tokens", "payload"]
)
def test_damaged_features_are_named_and_made_again(tmp_path, capsys, damage):
    data.write_shard(tmp_path / "corpus" / "a.npz", random_sequences(4))
    assert run(tmp_path, "features", *LAYOUT) == 0
    path = tmp_path / "features" / "a.bin"
    about = path.with_suffix(".json")
    values = json.loads(about.read_text())
    if damage == "payload":
        content = bytearray(path.read_bytes())
        content[1000] ^= 1
        path.write_bytes(content)
    elif damage == "no tokens":
        about.write_text(json.dumps({k: v for k, v in values.items() if k != "tokens"}))
    else:
        about.write_bytes(
            damage if damage[:1] != b"{" else json.dumps(values | json.loads(damage)).encode()
        )
    said: list[str] = []
    assert store_of(tmp_path, chat_target(), said) == []
    assert len(said) == 1 and "a.bin" in said[0] and "run `features` again" in said[0]
    capsys.readouterr()
    assert run(tmp_path, "features", *LAYOUT) == 0
    assert "features: 1 shards made" in capsys.readouterr().out
    assert store_of(tmp_path, chat_target(), said) == ["a"]


def test_new_rows_are_never_seen_under_an_old_description(tmp_path, monkeypatch):
    make_shards(tmp_path, ["a"])
    seen = []
    replace = features.os.replace

    def watched(source, path):
        seen.append((path.name, path.with_suffix(".json").exists()))
        replace(source, path)

    monkeypatch.setattr(features.os, "replace", watched)
    make_shards(tmp_path, ["a"])
    assert [s for s in seen if s[0].startswith("a.") and s[0] != "a.npz"] == [
        ("a.bin", False),
        ("a.json", False),
    ]


def test_features_without_a_corpus_are_refused(tmp_path, capsys):
    assert run(tmp_path, "features", *LAYOUT) == 1
    assert f"no usable corpus shards in {tmp_path / 'corpus'}" in capsys.readouterr().err


# -- shards -----------------------------------------------------------------------------------


def edit_shard(path: Path, **changes: object) -> None:
    with np.load(path) as file:
        np.savez(path, **{**file, **changes})


@pytest.mark.parametrize(
    "name, change",
    [
        ("tokens", lambda a: a + 200),
        ("tokens", lambda a: -a),
        ("tokens", lambda a: np.where(np.arange(len(a)) == 9, np.nan, a)),
        ("tokens", lambda a: a[:, None]),
        ("tokens", lambda a: a.astype(str)),
        ("offsets", lambda a: a.astype(float)),
        ("offsets", lambda a: a[-1]),
        ("offsets", lambda a: a[::-1].astype(np.uint64)),
        ("response_start", lambda a: a + 0.5),
        ("temperature", lambda a: a * np.nan),
        ("temperature", lambda a: a - 2),
        ("target", lambda a: np.array([1, 2])),
    ],
)
def test_a_shard_that_holds_nonsense_is_named_and_skipped(tmp_path, capsys, name, change):
    for shard in ("a", "b"):
        path = tmp_path / "corpus" / f"{shard}.npz"
        data.write_shard(path, random_sequences(4), mark_of(chat_target()))
    with np.load(path) as file:
        changed = change(file[name])
    edit_shard(path, **{name: changed})
    assert run(tmp_path, "features", *LAYOUT) == 0
    out = capsys.readouterr().out
    assert out.count("skipped: corpus shard") == 1 and str(path.with_suffix("")) in out
    assert "features: 1 shards made" in out
    assert store_of(tmp_path, chat_target(), []) == ["a"]
    assert run(tmp_path, "corpus", "--import-file", path) == 1
    assert str(path.with_suffix("")) in capsys.readouterr().err


def test_a_shard_without_sequences_is_damaged(tmp_path):
    none = {name: np.zeros(int(name == "offsets"), np.int64) for name in data.ARRAYS}
    np.savez(tmp_path / "a.npz", **none)
    with pytest.raises(ValueError, match=r"a\.npz is damaged: it has no sequences"):
        data.read_shard(tmp_path / "a.npz")


def test_a_corpus_of_another_target_is_named_and_never_used(tmp_path, capsys):
    other = chat_target(5)
    assert ask(tmp_path) == 0
    assert data.read_shard(tmp_path / "corpus" / "corpus-0000.npz", mark_of(chat_target()))
    assert run(tmp_path, "features", *LAYOUT, target=other) == 1
    found = capsys.readouterr()
    assert "corpus-0000.npz was made for another target" in found.out
    assert "no usable corpus shards" in found.err
    draft = fixtures.make_drafter(other)
    said: list[str] = []
    with pytest.raises(ValueError, match=r"no shard can be used.*made for another target"):
        data.count_answers(tmp_path, 101, said.append, mark_of(other))
    assert len(said) == 2
    assert ask(tmp_path, "--name", "mine", target=other) == 0
    assert run(tmp_path, "features", "--init", draft, target=other) == 0
    assert "features: 2 shards made" in capsys.readouterr().out
    said.clear()
    train, heldout = data.count_answers(tmp_path, 101, said.append, mark_of(other))
    mine = [data.read_shard(p) for p in data.shards_named(tmp_path, "mine")]
    assert train.sum() + heldout.sum() == sum(len(s.answer) for part in mine for s in part)
    assert len(said) == 2
    # A shard that says no target is taken by what it holds; its features say of which they are.
    edit = tmp_path / "corpus" / "corpus-0000.npz"
    data.write_shard(edit, data.read_shard(edit))
    assert run(tmp_path, "features", *LAYOUT, target=other) == 0
    assert store_of(tmp_path, other, []) == ["corpus-0000", "mine-0000", "mine-0001"]


def test_training_skips_a_shard_of_another_target(tmp_path):
    make_shards(tmp_path, ["a", "b"])
    path = tmp_path / "corpus" / "b.npz"
    data.write_shard(path, data.read_shard(path), 8)
    said: list[str] = []
    assert batches.Store(tmp_path, TAPS, 7, said.append).refresh() == ["a"]
    assert said == [f"skipped: corpus shard {path} was made for another target"]


def test_an_import_is_stamped_and_must_fit_the_target(tmp_path, capsys):
    source = tmp_path / "x.npz"
    data.write_shard(source, random_sequences(60))
    for _ in range(2):  # the same again goes on where it was
        assert run(tmp_path, "corpus", "--import-file", source) == 0
    shard = tmp_path / "corpus" / "x-0001.npz"
    assert data.read_shard(shard, mark_of(chat_target()))
    with pytest.raises(ValueError, match=r"x-0001\.npz was made for another target"):
        data.read_shard(shard, 1)
    assert run(tmp_path, "corpus", "--import-file", shard, target=chat_target(5)) == 1
    assert f"{shard} was made for another target" in capsys.readouterr().err
    data.write_shard(tmp_path / "corpus" / "x-0009.npz", random_sequences(2))
    assert run(tmp_path, "corpus", "--import-file", source) == 1
    assert "other shards named x; give another --name" in capsys.readouterr().err
    (tmp_path / "corpus" / "x-0009.npz").unlink()
    before = shard.read_bytes()
    assert run(tmp_path, "corpus", "--import-file", source, target=chat_target(5)) == 1
    assert "other shards named x" in capsys.readouterr().err and shard.read_bytes() == before
    assert run(tmp_path, "corpus", "--import-file", source, "--name", "y") == 0
    assert (tmp_path / "corpus" / "y-0001.npz").exists()
    assert run(tmp_path, "corpus", "--import-file", source.rename(tmp_path / ".x.npz")) == 1
    assert "its name must be a plain name" in capsys.readouterr().err
    assert run(tmp_path, "corpus", "--import-file", source) == 1
    assert f"import-file: {source} is not a file" in capsys.readouterr().err
    source = tmp_path / ".x.npz"
    short = tmp_path / "short.npz"
    data.write_shard(short, random_sequences(3, length=8)[:1])
    edit_shard(short, tokens=np.arange(3, 11), offsets=np.array([0, 8]))
    assert run(tmp_path, "corpus", "--import-file", short) == 1
    assert f"{short} has no answer of at least 12 tokens" in capsys.readouterr().err
    assert run(tmp_path, "corpus", "--import-file", source, "--compose", "3") == 1
    assert "--import-file is alone" in capsys.readouterr().err
