"""Whole training runs on TINY: resuming after kill -9, several processes, overfitting, corpora."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import fixtures
import numpy as np
import pytest
import torch
from train_drafter import checkpoint, data, evaluate, features, generate, train
from train_drafter.__main__ import main
from train_drafter.batches import Store
from train_drafter.drafter import TrainableDrafter
from train_drafter.layout import load_weights, new_config, read_config
from train_drafter.options import TrainOptions
from train_drafter.proxy import proxy_sums
from train_drafter.run import RunOptions, prepare, start
from train_drafter.target import load_target_weights

from ddtree import Engine, SamplingParams
from ddtree.kernels import get_ops
from ddtree.models.registry import build_target

CPU = torch.device("cpu")
TAPS = fixtures.TINY_TAPS


def make_work(work: Path, target: Path, shards: int = 3) -> None:
    """Shards of random sequences, with the target's real features."""
    model = build_target(target, get_ops("torch", CPU), CPU, torch.float32, progress=False)
    mark = load_target_weights(target).fingerprint
    for number in range(shards):
        rng = np.random.default_rng(number)
        sequences = [
            data.Sequence(rng.integers(3, 98, 40 + int(rng.integers(0, 9))), 6, float(i % 2))
            for i in range(30)
        ]
        data.write_shard(work / "corpus" / f"r-{number}.npz", sequences)
    features.add_features(work, model, TAPS, mark, lambda text: None)


def make_run(work: Path, target: Path, options: TrainOptions, name: str = "run") -> Path:
    config = new_config(target, 2, 6, list(TAPS), fixtures.TINY_MASK, 80)
    prepare(work / "runs" / name, target, config, options, {"init": ""})
    return work / "runs" / name


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    state = checkpoint.load_state(run)
    assert state is not None
    return {"step": torch.tensor(state["progress"]["step"]), **state["model"], **state["ema"]}


def train_until_killed(job: RunOptions, options: TrainOptions, call: str, count: int) -> None:
    """Train, and die of SIGKILL at the `count`-th call: of a training step, before a checkpoint is
    flushed ("fsync"), or when the one before is put aside and the new one not yet in place."""
    calls = itertools.count(1)

    def deadly(real, counts=lambda *args: True):
        def wrapper(*args):
            if counts(*args) and next(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args)

        return wrapper

    if call == "step":
        train.Trainer.step = deadly(train.Trainer.step)
    elif call == "fsync":
        os.fsync = deadly(os.fsync)
    else:
        os.replace = deadly(os.replace, lambda _, to: Path(to).name == checkpoint.NAMES[0])
    start(job, options)


def test_a_killed_run_ends_like_one_that_was_never_killed(tmp_path):
    target = fixtures.tiny_target()
    make_work(tmp_path, target)
    options = TrainOptions(
        steps=60, batch=4, anchors=8, warmup=5, save_seconds=0.0, eval_seconds=1.0, eval_tokens=8
    )
    whole = make_run(tmp_path, target, options, "whole")
    start(RunOptions(tmp_path, "whole", target), options)
    killed = make_run(tmp_path, target, options, "killed")
    job = RunOptions(tmp_path, "killed", target)
    # Forked from a small server: a whole test session's memory may not be had twice.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([start.__module__])
    for call, count, left in (("step", 18, 17), ("fsync", 13, 29), ("replace", 12, 40)):
        process = context.Process(target=train_until_killed, args=(job, options, call, count))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        state = checkpoint.load_state(killed)
        assert state is not None and state["progress"]["step"] == left
    start(job, options)
    expected, found = weights_of(whole), weights_of(killed)
    assert int(found["step"]) == 60 and expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    rows = [(run / "loss.csv").read_text().splitlines() for run in (whole, killed)]
    strip = lambda lines: [re.sub(r",[\d.]+,", ",", line, count=1) for line in lines]  # noqa: E731
    assert strip(rows[0]) == strip(rows[1]) and len(rows[0]) == 7


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path):
    for step in (1, 2):
        checkpoint.save_state(tmp_path, {"step": step, "data": torch.zeros(1000)})
    newest = tmp_path / "last.pt"
    newest.write_bytes(newest.read_bytes()[:1500])
    said = []
    state = checkpoint.load_state(tmp_path, said.append)
    assert state is not None and state["step"] == 1
    assert len(said) == 1 and str(newest) in said[0] and "damaged" in said[0]


def test_checkpoints_come_at_least_every_minute():
    assert TrainOptions().save_seconds <= 60


def test_two_processes_cannot_train_the_same_run(tmp_path):
    target = fixtures.tiny_target()
    make_work(tmp_path, target, shards=1)
    options = TrainOptions(steps=1, batch=2, anchors=4)
    run = make_run(tmp_path, target, options)
    with checkpoint.lock(run), pytest.raises(ValueError, match="being trained by another"):
        start(RunOptions(tmp_path, "run", target), options)


def test_a_run_of_another_target_or_shape_is_refused(tmp_path):
    target = fixtures.tiny_target()
    options = TrainOptions(steps=1)
    make_run(tmp_path, target, options)
    other = fixtures.make_target(seed=5)
    with pytest.raises(ValueError, match="started with another target"):
        make_run(tmp_path, other, options)
    config = new_config(target, 2, 8, list(TAPS), fixtures.TINY_MASK, 80)
    with pytest.raises(ValueError, match="started with another config"):
        prepare(tmp_path / "runs" / "run", target, config, options, {"init": ""})


def test_command_line_names_mistakes_in_one_line(tmp_path, capsys):
    target = str(fixtures.tiny_target())
    common = ["--target", target, "--work", str(tmp_path)]
    assert main(["train", *common]) == 1
    assert "give --steps or --minutes" in capsys.readouterr().err
    assert main(["train", *common, "--steps", "1", "--taps", "0", "--mask-token", "98"]) == 1
    assert "no usable feature shards" in capsys.readouterr().err
    assert main(["corpus", *common]) == 1
    assert "--prompts" in capsys.readouterr().err
    other = fixtures.make_drafter(fixtures.make_target(hidden_size=32))
    assert main(["train", *common, "--steps", "1", "--init", str(other)]) == 1
    assert "made for another target" in capsys.readouterr().err


class Template:
    """A tokenizer of numbers, for a target folder that has none."""

    chat_template = ""

    def encode(self, text: str) -> list[int]:
        return [int(part) for part in text.split()]


def test_corpus_is_the_engines_own_output_and_resumes(tmp_path, monkeypatch):
    target = fixtures.tiny_target()
    monkeypatch.setattr(Engine, "tokenizer", Template())
    rng = np.random.default_rng(0)
    asked = [" ".join(map(str, rng.integers(3, 98, 6))) for _ in range(10)]
    options = generate.CorpusOptions("g", max_new_tokens=24, shard_prompts=4)
    with Engine(str(target), max_batch_size=4, max_model_len=64) as engine:
        quiet = lambda text: None  # noqa: E731
        generate.make_corpus(engine, asked, tmp_path, options, quiet)
        paths = data.shard_paths(tmp_path)
        assert [path.stem for path in paths] == ["g-0000", "g-0001", "g-0002"]
        contents = {path.name: path.read_bytes() for path in paths}
        for path in paths:
            for sequence in data.read_shard(path):
                again = engine.generate(
                    sequence.prompt.tolist(),
                    SamplingParams(max_new_tokens=24, speculation="off"),
                )[0]
                answer = sequence.answer.tolist()
                assert sequence.temperature > 0 or answer == again.token_ids[: len(answer)]
        paths[1].unlink()
        generate.make_corpus(engine, asked, tmp_path, options, quiet)
        assert {path.name: path.read_bytes() for path in data.shard_paths(tmp_path)} == contents


def test_corpus_begins_no_shard_that_would_end_too_late(tmp_path, monkeypatch):
    clock = [0.0]

    def answer(engine, chunk, options, index):
        clock[0] += 25.0
        tokens = np.random.default_rng(index).integers(3, 98, 40)
        return [data.Sequence(tokens, 6, 0.0)], 34

    monkeypatch.setattr(generate, "_answer", answer)
    monkeypatch.setattr(generate, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    engine = SimpleNamespace(tokenizer=Template(), max_model_len=64)
    for minutes, shards in ((0.1, 1), (1.0, 3), (0.0, 4)):
        options = generate.CorpusOptions("c", shard_prompts=2, minutes=minutes)
        generate.make_corpus(engine, ["5 6"] * 8, tmp_path, options, lambda text: None)
        assert len(data.shard_paths(tmp_path)) == shards


@pytest.mark.parametrize("value", ["-0.1", "1", "1.5", "nan"])
def test_a_dropout_out_of_range_is_refused(tmp_path, capsys, value):
    command = ["train", "--target", str(fixtures.tiny_target()), "--work", str(tmp_path)]
    with pytest.raises(SystemExit):
        main([*command, "--steps", "1", "--dropout", value])
    assert "--dropout: must be a finite number at least 0 and below 1" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def write_answers(work: Path, answers: list[list[int]]) -> None:
    """A shard of prompts that all train but one, which is held out and has the last answer."""
    prompts = (np.array([5, n]) for n in itertools.count(6))
    train = list(itertools.islice((p for p in prompts if not data.is_heldout(p)), len(answers) - 1))
    held = next(p for n in itertools.count(6) if data.is_heldout(p := np.array([5, n])))
    data.write_shard(
        work / "corpus" / "a-0000.npz",
        [
            data.Sequence(np.concatenate([prompt, answer]), 2, 0.0)
            for prompt, answer in zip([*train, held], answers, strict=True)
        ],
    )


def test_a_shortlist_is_of_the_most_frequent_tokens(tmp_path, capsys):
    target = fixtures.tiny_target()
    draft = fixtures.make_drafter(target)
    write_answers(tmp_path, [[40] * 5 + [7] * 3 + [90] * 4, [90, 90, 12, 13], [40, 55, 55, 55, 7]])
    command = ["--target", str(target), "--work", str(tmp_path)]
    ask = ["shortlist", *command, "--draft", str(draft), "--size"]
    assert main([*ask, "3"]) == 0
    # 14 of 16 tokens, and 2 of 5.
    assert "3 tokens, 87.50% of the answers, 40.00% of those held out" in capsys.readouterr().out
    with Engine(str(target), str(draft), budget=6) as engine:
        assert engine.describe()["draft_vocab_size"] == 3
        (output,) = engine.generate([5, 6], SamplingParams(max_new_tokens=9, trace=True))
        drafted = {token for r in output.trace for token in r.tokens[1:]}
        assert drafted and drafted <= {7, 40, 90}
    assert "of them" not in capsys.readouterr().out
    # Again, from what is there now; training goes on from it with the whole vocabulary.
    assert main([*ask, "4"]) == 0
    with Engine(str(target), str(draft)) as engine:
        assert engine.describe()["draft_vocab_size"] == 4
        assert engine._target.draft_tokens.tolist() == [7, 12, 40, 90]
    assert main([*ask, "8"]) == 0
    assert "3 of them, those of the lowest ids, are in no answer" in capsys.readouterr().out
    config = json.loads((draft / "config.json").read_text())
    config["dflash_config"]["draft_vocab_size"] = config.pop("draft_vocab_size")
    (draft / "config.json").write_text(json.dumps(config))
    make_work(tmp_path, target, shards=1)
    (tmp_path / "corpus" / "a-0000.npz").unlink()
    begin = ["train", *command, "--init", str(draft), "--steps", "1", "--batch", "2"]
    assert main(begin) == 0
    made = tmp_path / "runs" / "default" / "latest"
    assert read_config(made, target).draft_vocab_size is None
    with Engine(str(target), str(made)) as engine:
        assert engine._target.draft_tokens is None


def test_a_shortlist_replaces_one_under_another_name(tmp_path, capsys):
    target = fixtures.tiny_target()
    draft = fixtures.make_drafter(target, draft_tokens=[3, 4], prefix="model.")
    write_answers(tmp_path, [[40, 41, 42], [3, 4]])
    command = ["shortlist", "--target", str(target), "--work", str(tmp_path), "--draft", str(draft)]
    assert main([*command, "--size", "3"]) == 0
    with Engine(str(target), str(draft)) as engine:
        assert engine._target.draft_tokens.tolist() == [40, 41, 42]
    load_weights(TrainableDrafter(read_config(draft, target)).requires_grad_(False), draft)
    (draft / "model.safetensors").write_bytes(b"no weights")
    assert main([*command, "--size", "3"]) == 1
    (draft / "model.safetensors").rename(draft / "model-00001-of-00001.safetensors")
    assert main([*command, "--size", "3"]) == 1
    err = capsys.readouterr().err
    assert err.count("model.safetensors must hold the drafter's weights") == 2


def test_a_shortlist_that_cannot_be_made_is_refused(tmp_path, capsys):
    target, draft = fixtures.tiny_target(), fixtures.make_drafter(fixtures.tiny_target())
    command = ["shortlist", "--target", str(target), "--work", str(tmp_path)]
    command += ["--draft", str(draft), "--size"]
    before = (draft / "config.json").read_bytes(), (draft / "model.safetensors").read_bytes()
    for size in ("0", "-1", "101"):
        assert main([*command, size]) == 1
        assert "--size must be from 1 to 100" in capsys.readouterr().err
    assert main([*command, "5"]) == 1
    assert "no answers" in capsys.readouterr().err
    for wrong, why in ((101, "has tokens beyond the vocabulary of 101"), (-3, "at least 0")):
        write_answers(tmp_path, [[40, wrong], [3, 4]])
        assert main([*command, "5"]) == 1
        err = capsys.readouterr().err
        assert "a-0000.npz" in err and why in err
    assert before == (
        (draft / "config.json").read_bytes(),
        (draft / "model.safetensors").read_bytes(),
    )


def test_an_evaluation_is_without_dropout(tmp_path):
    target, draft = fixtures.tiny_target(), fixtures.tiny_drafter()
    weights = load_target_weights(target)
    model = TrainableDrafter(read_config(draft, target), 64, dropout=0.5)
    store = Store(tmp_path, TAPS, weights.fingerprint)
    trainer = train.Trainer(tmp_path, {}, model, weights, store, TrainOptions(), print)
    modes = []
    with mock.patch.object(train, "proxy_sums") as sums, mock.patch.object(train, "save_drafter"):
        sums.side_effect = lambda *given: modes.append(model.training) or torch.ones(8)
        trainer.evaluate()
    assert modes == [False] and model.training


def test_processes_end_together_whatever_time_each_has_spent(tmp_path, monkeypatch):
    """A run's time is the mean over its processes, and the same number in all of them."""
    target, draft = fixtures.tiny_target(), fixtures.tiny_drafter()
    model = TrainableDrafter(read_config(draft, target), 64)
    weights = load_target_weights(target)
    store = Store(tmp_path, TAPS, weights.fingerprint)
    options = TrainOptions(minutes=0.1)
    trainer = train.Trainer(tmp_path, {}, model, weights, store, options, print)
    trainer.world = 2
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)

    def with_a_slower_one(mine):
        mine *= 2
        mine[-1] += 3.0

    monkeypatch.setattr(train.dist, "all_reduce", with_a_slower_one)
    for spent in (1.0, 1.0, 0.0):
        before = trainer.share_done()
        trainer._spent = spent
        assert trainer.share_done() == before
        assert trainer._average_gradients(7.0) == 7.0
    assert trainer.progress.seconds == 2.5 + 2.5 + 1.5
    assert all(bool((p.grad == 1).all()) for p in model.parameters())


@pytest.mark.slow
def test_two_processes_train_together(tmp_path):
    target = fixtures.tiny_target()
    make_work(tmp_path, target)
    options = TrainOptions(steps=12, batch=2, anchors=8, warmup=2, eval_tokens=8)
    run = make_run(tmp_path, target, options)
    start(RunOptions(tmp_path, "run", target, processes=2), options)
    result = json.loads((run / "result.json").read_text())
    assert result["processes"] == 2
    assert int(weights_of(run)["step"]) == 12


@pytest.mark.slow
def test_a_tiny_pair_overfits_to_more_than_three_tokens_per_round(tmp_path):
    """Also: the offline proxy says what the engine then measures."""
    began = time.process_time()  # one thread: on an idle machine the same as wall time
    target = fixtures.tiny_target()
    rng = np.random.default_rng(0)
    asked = [rng.integers(3, 98, 6).tolist() for _ in range(16)]
    params = SamplingParams(max_new_tokens=40, speculation="off")
    with Engine(str(target), max_batch_size=8, max_model_len=128) as engine:
        answers = [output.token_ids for output in engine.generate(asked, params)]
    sequences = [
        data.Sequence(np.array(prompt + answer), len(prompt), 0.0)
        for prompt, answer in zip(asked, answers, strict=True)
    ]
    data.write_shard(tmp_path / "corpus" / "o-0.npz", sequences)
    weights = load_target_weights(target)
    model = build_target(target, get_ops("torch", CPU), CPU, torch.float32, progress=False)
    features.add_features(tmp_path, model, TAPS, weights.fingerprint, lambda text: None)
    options = TrainOptions(
        steps=250, batch=4, anchors=24, warmup=20, lr=3e-3, ema=0.95, eval_seconds=1e9, gamma=5.0
    )
    run = make_run(tmp_path, target, options)
    start(RunOptions(tmp_path, "run", target), options)
    with Engine(
        str(target), str(run / "latest"), budget=64, max_batch_size=8, max_model_len=128
    ) as engine:
        report = evaluate.measure(engine, asked, max_new_tokens=40)["greedy"]
    assert report["chain"]["tokens_per_round"] > 3
    assert report["tree-16"]["tokens_per_round"] >= report["chain"]["tokens_per_round"]
    assert all(row["identical_to_plain"] == "16/16" for row in report.values())
    drafter = TrainableDrafter(read_config(run / "latest", target), 128)
    with torch.no_grad():
        load_weights(drafter, run / "latest")
    store = Store(tmp_path, TAPS, weights.fingerprint)
    store.refresh()
    items = [*store.train["o-0"], *store.heldout["o-0"]]
    sums = proxy_sums(drafter, weights, items, 39)
    assert float(sums[0] / sums[1]) == pytest.approx(report["chain"]["tokens_per_round"], rel=0.03)
    assert time.process_time() - began < 120
