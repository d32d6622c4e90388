"""Mistakes in training a drafter: each is one line that says what is wrong, and spoils nothing."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import fixtures
import pytest
import torch
from jobs import one_of
from safetensors.torch import load_file, save_file
from stubs import tiny_tokenizer
from test_train_drafter_runs import make_run, make_work, write_answers
from train_drafter import checkpoint, data, train
from train_drafter.__main__ import main
from train_drafter.curves import read_rows
from train_drafter.layout import save_drafter, shorten
from train_drafter.options import TrainOptions
from train_drafter.processes import run_all
from train_drafter.run import RunOptions, prepare, start
from train_drafter.target import load_target_weights

SHORT = TrainOptions(steps=2, batch=2, anchors=4, eval_tokens=8)
SHAPE = ["--taps", "0", "1", "3", "--mask-token", "98", "--intermediate-size", "80"]


def run_of(work: Path, target: Path, name: str = "m") -> Path:
    """A run folder whose best is TINY's random drafter."""
    run = make_run(work, target, SHORT, name)
    shutil.copytree(fixtures.make_drafter(target), run / "best")
    return run


def talking_target() -> Path:
    """A copy of TINY's target with a tokenizer."""
    folder = fixtures.make_target()
    tiny_tokenizer().save_pretrained(folder)
    return folder


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def line(capsys) -> str:
    """The one line on stderr."""
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    return err


# -- arguments --------------------------------------------------------------------------------

ALL = ("corpus", "features", "train", "shortlist", "calibrate", "evaluate")
WRONG = [
    *((command, "--threads", value) for command in ALL for value in ("0", "-1", "x")),
    *(("train", f"--{name}", "nan") for name in ("clip", "weight-decay", "lr", "minutes")),
    *(("train", f"--{name}", "0") for name in ("batch", "anchors", "gamma", "clip", "processes")),
    *(("train", f"--{name}", "-1") for name in ("steps", "minutes", "batch", "seed", "reach")),
    *(("train", f"--{name}", "1.01") for name in ("decay", "ema", "distill", "sampled-fall")),
    *((name, "--intermediate-size", "0") for name in ("train", "features")),
    *(
        (name, *wrong)
        for name in ("train", "features")
        for wrong in (("--block-size", "1"), ("--taps", "-1"))
    ),
    *(("train", "--run", value) for value in ("", ".", "..", "a/b", "/a", "a\\b", "n" * 201)),
    *(("corpus", "--name", value) for value in ("", "..", "../x", "a/b")),
    *((name, "--run", "..") for name in ("shortlist", "calibrate", "evaluate")),
    *((name, "--seed", str(2**70)) for name in ("train", "corpus", "calibrate", "evaluate")),
    *((name, "--max-new-tokens", "0") for name in ("corpus", "calibrate", "evaluate")),
    *(("corpus", name, "-1") for name in ("--minutes", "--compose", "--self-instruct")),
    *(("corpus", name, "0") for name in ("--shard-prompts", "--batch-size")),
    ("calibrate", "--compose", "0"),
    ("evaluate", "--budgets", "0"),
    ("evaluate", "--limit", "-1"),
    ("train", "--eval-seconds", "inf"),
    ("train", "--lr", "1.5"),
    *(("train", name, "~nobody-here/x") for name in ("--target", "--work", "--init")),
    ("train", "--steps", "1.5"),
]


@pytest.mark.parametrize(("command", "option", "value"), WRONG)
def test_a_value_out_of_range_is_named_with_its_range(tmp_path, capsys, command, option, value):
    with pytest.raises(SystemExit) as error:
        main([command, "--target", "x", "--work", str(tmp_path), option, value])
    assert error.value.code == 2
    assert f"argument {option}: must be a " in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_every_default_is_in_its_range():
    from train_drafter.__main__ import parser

    for command in ALL:
        args = vars(parser().parse_args([command, "--target", "x"]))
        for name, value in args.items():
            option = "--" + name.replace("_", "-")
            if value and isinstance(value, (int, float)):
                assert parser().parse_args([command, "--target", "x", option, str(value)])


@pytest.mark.parametrize("command", ALL)
def test_a_work_folder_that_is_a_file_or_in_one_is_named(tmp_path, capsys, command):
    file = tmp_path / "file"
    file.write_text("")
    for work in (file, file / "below"):
        given = ["--target", str(fixtures.tiny_target()), "--work", str(work)]
        assert main([command, *given, *(["--steps", "1"] if command == "train" else [])]) == 1
        assert f"work: {file} is a file" in line(capsys)


# -- the target -------------------------------------------------------------------------------


def damaged_target(damage: str) -> tuple[Path, str]:
    """A target folder with a damaged file, and that file's name."""
    folder = fixtures.make_target(shard_size="100KB" if damage in ("index", "shard") else "5GB")
    index = folder / "model.safetensors.index.json"
    if damage == "index":
        index.write_text("{}")
        return folder, index.name
    if damage == "config":
        (folder / "config.json").write_text("{")
        return folder, "config.json"
    path = folder / "model.safetensors"
    if damage == "shard":
        path = folder / json.loads(index.read_text())["weight_map"]["model.norm.weight"]
        path.unlink()
    elif damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-100])
    return folder, path.name


@pytest.mark.parametrize("damage", ["index", "shard", "config", "missing", "truncated"])
def test_a_damaged_target_file_is_named(tmp_path, capsys, damage):
    target, name = damaged_target(damage)
    command = ["train", "--target", str(target), "--work", str(tmp_path), "--steps", "1"]
    assert main([*command, *SHAPE]) == 1
    assert str(target / name) in line(capsys)
    assert not (tmp_path / "runs").exists()
    if damage != "config":
        with pytest.raises(ValueError, match=f"^target: .*{name}"):
            load_target_weights(target)


@pytest.mark.parametrize("target", ["", "no/such/folder"])
def test_a_target_that_is_none_is_named(tmp_path, capsys, target):
    assert main(["train", "--target", target, "--work", str(tmp_path), "--steps", "1"]) == 1
    assert "target: " in line(capsys)


@pytest.mark.parametrize("command", ["shortlist", "calibrate", "evaluate"])
def test_a_run_of_another_target_is_refused(tmp_path, capsys, command):
    run = run_of(tmp_path, fixtures.tiny_target())
    write_answers(tmp_path, [[40, 41, 42], [3, 4]])
    before = contents(run)
    other = fixtures.make_target(seed=5)
    given = ["--target", str(other), "--work", str(tmp_path)]
    size = ["--size", "3"] if command == "shortlist" else []
    for which in (["--run", "m"], ["--draft", str(run / "best")]):
        assert main([command, *given, *which, *size]) == 1
        assert f"run: {run} was started with another target" in line(capsys)
    assert contents(run) == before


def test_a_target_without_a_tokenizer_is_named(tmp_path, capsys):
    target = fixtures.tiny_target()
    run_of(tmp_path, target)
    write_answers(tmp_path, [[40, 41, 42], [3, 4]])
    for command in ("evaluate", "calibrate"):
        given = [command, "--target", str(target), "--work", str(tmp_path), "--run", "m"]
        assert main(given) == 1
        assert "has no tokenizer" in capsys.readouterr().err.splitlines()[-1]


# -- the run's files --------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["{}", "[]", "null", "", "{", '{"target": 1, "config": 2}'])
def test_a_damaged_run_json_is_named(tmp_path, capsys, text):
    target = fixtures.tiny_target()
    run = run_of(tmp_path, target)
    (run / "run.json").write_text(text)
    given = ["--target", str(target), "--work", str(tmp_path), "--run", "m"]
    for command in (["train", "--steps", "1", *SHAPE], ["evaluate"], ["calibrate"]):
        assert main([*command, *given]) == 1
        assert f"run: {run / 'run.json'} is damaged" in line(capsys)


def test_a_run_that_could_not_begin_leaves_its_name_free(tmp_path):
    target = fixtures.tiny_target()
    run = tmp_path / "runs" / "m"
    config = json.loads((fixtures.tiny_drafter() / "config.json").read_text())
    wrong = config | {"dflash_config": {"target_layer_ids": [99], "mask_token_id": 98}}
    with pytest.raises(ValueError, match="target_layer_ids must be layers of the target"):
        prepare(run, target, wrong, SHORT, {"init": ""})
    prepare(run, target, config, SHORT, {"init": "mistaken"})
    prepare(run, target, config, SHORT, {"init": "right"})
    assert json.loads((run / "run.json").read_text())["init"] == "right"
    (run / "last.pt").write_bytes(b"")
    prepare(run, target, config, SHORT, {"init": "later"})
    assert json.loads((run / "run.json").read_text())["init"] == "right"


def test_a_run_whose_checkpoints_are_all_damaged_is_refused(tmp_path, capsys):
    target = fixtures.tiny_target()
    make_work(tmp_path, target, shards=1)
    run = make_run(tmp_path, target, SHORT)
    start(RunOptions(tmp_path, "run", target), SHORT)
    for name in checkpoint.NAMES:
        (run / name).write_bytes(b"PK\x03\x04 damaged")
    before = contents(run / "best")
    capsys.readouterr()
    with pytest.raises(ValueError, match=r"all its checkpoints are damaged.*delete them") as error:
        start(RunOptions(tmp_path, "run", target), SHORT)
    assert all(str(run / name) in str(error.value) for name in checkpoint.NAMES)
    out = capsys.readouterr().out
    assert out.count("\n") == 2 and out.count("is damaged\n") == 2
    checkpoint.save_state(run, {"model": {}})
    with pytest.raises(ValueError, match=r"the checkpoint in .* does not fit this drafter"):
        start(RunOptions(tmp_path, "run", target), SHORT)
    assert contents(run / "best") == before


@pytest.mark.parametrize("heldout", [True, False])
def test_untrained_weights_never_replace_a_better_drafter(tmp_path, monkeypatch, heldout):
    target = fixtures.tiny_target()
    make_work(tmp_path, target, shards=1)
    run = make_run(tmp_path, target, SHORT)
    scores = iter([1.0, 1.5, 1.2, 1.4, 1.1, 1.6])

    def sums(*given):
        score = next(scores)
        return torch.tensor([score, 1.0, 1.0, *[0.0] * 5]) if heldout else torch.zeros(8)

    monkeypatch.setattr(train, "proxy_sums", sums)
    written = []
    real = save_drafter
    monkeypatch.setattr(
        train,
        "save_drafter",
        lambda folder, *rest: (written.append(folder.name), real(folder, *rest)),
    )
    for expected in (2, 0 if heldout else 1, 1):
        for name in checkpoint.NAMES:
            (run / name).unlink(missing_ok=True)
        start(RunOptions(tmp_path, "run", target), SHORT)
        assert written.count("best") == expected
        assert [row["step"] for row in read_rows(run / "acceptance.csv")] == ["0", "2"]
        written.clear()


def test_a_best_that_was_deleted_is_made_again(tmp_path, monkeypatch):
    target = fixtures.tiny_target()
    make_work(tmp_path, target, shards=1)
    run = make_run(tmp_path, target, SHORT)
    scores = iter([2.0, 2.0, 1.0, 1.5])
    monkeypatch.setattr(
        train, "proxy_sums", lambda *_: torch.tensor([next(scores), 1.0, 1.0, *[0.0] * 5])
    )
    start(RunOptions(tmp_path, "run", target), SHORT)
    shutil.rmtree(run / "best")
    for name in checkpoint.NAMES:
        (run / name).unlink(missing_ok=True)
    start(RunOptions(tmp_path, "run", target), SHORT)
    assert (run / "best" / "model.safetensors").exists()


def test_a_finished_run_leaves_its_drafter_alone(tmp_path, monkeypatch):
    """The same command again must not undo what later stages did to `best`."""
    target = fixtures.tiny_target()
    make_work(tmp_path, target, shards=1)
    run = make_run(tmp_path, target, SHORT)
    monkeypatch.setattr(train, "proxy_sums", lambda *_: torch.zeros(8))  # no held-out answers
    start(RunOptions(tmp_path, "run", target), SHORT)
    shorten(run / "best", torch.arange(60))
    (run / "best" / "calibration.json").write_text("{}")
    before = contents(run / "best")
    start(RunOptions(tmp_path, "run", target), SHORT)
    assert contents(run / "best") == before
    start(RunOptions(tmp_path, "run", target), replace(SHORT, steps=3))
    assert not (run / "best" / "calibration.json").exists()
    assert "draft_vocab_size" not in json.loads((run / "best" / "config.json").read_text())


def test_a_run_in_use_is_not_touched(tmp_path, capsys):
    target = fixtures.tiny_target()
    make_work(tmp_path, target, shards=1)
    command = ["train", "--target", str(target), "--work", str(tmp_path), *SHAPE, "--steps", "1"]
    assert main([*command, "--batch", "2"]) == 0
    about = tmp_path / "runs/default/run.json"
    before = about.read_text()
    with checkpoint.lock(about.parent):
        assert main([*command, "--batch", "2", "--lr", "0.1"]) == 1
    assert "is being trained by another process" in line(capsys)
    assert about.read_text() == before


# -- divergence -------------------------------------------------------------------------------


@pytest.mark.parametrize("spoilt", ["loss", "gradient"])
def test_a_loss_that_is_no_number_ends_the_run_before_the_weights_are_spoilt(
    tmp_path, monkeypatch, spoilt
):
    target = fixtures.tiny_target()
    make_work(tmp_path, target, shards=1)
    run = make_run(tmp_path, target, SHORT)
    real, kept, calls = train.Trainer.loss, {}, itertools.count()

    def loss(self, *given):
        value = real(self, *given)
        if next(calls) < 1:
            return value
        kept.update({"model": self.model, **{n: t.clone() for n, t in self.ema.items()}})
        return value * torch.nan if spoilt == "loss" else (value - value.detach()) * torch.inf

    monkeypatch.setattr(train.Trainer, "loss", loss)
    with pytest.raises(ValueError, match=r"train: the run diverged: the loss of step 2 .*--lr"):
        start(RunOptions(tmp_path, "run", target), SHORT)
    assert all(bool(t.isfinite().all()) for t in kept.pop("model").state_dict().values())
    assert all(bool(t.isfinite().all()) for t in load_file(run / "best/model.safetensors").values())


def test_a_diverging_run_keeps_its_best_finite(tmp_path, capsys):
    target = fixtures.tiny_target()
    make_work(tmp_path, target, shards=1)
    command = ["train", "--target", str(target), "--work", str(tmp_path), "--run", "d"]
    ask = ["--lr", "1", "--warmup", "0", "--decay", "0", "--batch", "2", "--steps", "30"]
    assert main([*command, *ask, *SHAPE, "--weight-decay", "1000"]) == 1
    assert "the run diverged" in line(capsys)
    best = load_file(tmp_path / "runs/d/best/model.safetensors")
    assert all(bool(t.isfinite().all()) for t in best.values())


def test_a_drafter_that_has_diverged_is_named(tmp_path, capsys):
    target = talking_target()
    draft = fixtures.make_drafter(target)
    weights = load_file(draft / "model.safetensors")
    name = next(iter(weights))
    weights[name].view(-1)[3] = torch.nan
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    given = ["--target", str(target), "--work", str(tmp_path)]
    make_work(tmp_path, target, shards=1)
    for command in (
        ["calibrate", "--draft", str(draft)],
        ["evaluate", "--draft", str(draft)],
        ["train", "--init", str(draft), "--steps", "1"],
    ):
        assert main([*command, *given]) == 1
        assert "must hold finite numbers" in line(capsys)
    assert not (draft / "calibration.json").exists()


# -- prompts and the model card ---------------------------------------------------------------


def test_an_empty_prompts_file_is_not_replaced_by_composed_ones(tmp_path, capsys, monkeypatch):
    target, asked = talking_target(), []
    from train_drafter import calibrate

    def answer(engine, prompts, *rest):
        asked.extend(prompts)
        raise ValueError("prompts: none")

    monkeypatch.setattr(calibrate, "answer", answer)
    run_of(tmp_path, target)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("# nothing\n\n")
    given = ["--target", str(target), "--work", str(tmp_path), "--run", "m"]
    assert main(["calibrate", *given, "--prompts", str(prompts)]) == 1
    assert "prompts: " in line(capsys) and not asked


def card(work: Path, target: Path, draft: list[str], prompts: list[str]) -> tuple[str, dict]:
    """The model card and the report of an evaluation with these prompts."""
    file = work / "prompts.txt"
    file.write_text("\n".join(prompts))
    command = ["evaluate", "--target", str(target), "--work", str(work), "--prompts", str(file)]
    assert main([*command, *draft, "--max-new-tokens", "4", "--budgets", "2"]) == 0
    folder = Path(draft[1]) if draft[0] == "--draft" else work / "runs" / draft[1] / "best"
    return (folder / "README.md").read_text(), json.loads((folder / "evaluation.json").read_text())


def test_the_model_card_says_of_the_training_only_what_is_known(tmp_path):
    target = talking_target()
    run = run_of(tmp_path, target)
    result = {"step": 7, "seconds": 60.0, "epoch": 1.0, "chain": 1.5, "processes": 1}
    checkpoint.write_json(run / "result.json", result | {"sequences": 3, "answer_tokens": 9})
    tokenizer = tiny_tokenizer()
    known = ["abc", "bcd"]
    ids = [
        tokenizer.encode(
            tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False),
            add_special_tokens=False,
        )
        for text in known
    ]
    sequences = [data.Sequence(torch.tensor([*own, 5, 6]).numpy(), len(own), 0.0) for own in ids]
    data.write_shard(tmp_path / "corpus" / "a-0000.npz", sequences)
    text, report = card(tmp_path, target, ["--run", "m"], ["xyz", "zyx"])
    assert "none of them in the training corpus" in text and "7 steps" in text
    assert report["prompts_in_training"] == 0
    text, report = card(tmp_path, target, ["--run", "m"], ["xyz", *known])
    assert "2 of them in the training corpus" in text
    assert report["prompts_in_training"] == 2
    elsewhere = tmp_path / "elsewhere" / "best"
    shutil.copytree(run / "best", elsewhere)
    run_of(tmp_path, target, "default")
    text, report = card(tmp_path, target, ["--draft", str(elsewhere)], known)
    assert "training: not known" in text and report["prompts_in_training"] is None
    assert "whether they are in its training data is not known" in text
    text, _ = card(tmp_path, target, ["--draft", str(run / "best")], known)
    assert "7 steps" in text
    (run / "result.json").write_text("[]")
    assert "training: not known" in card(tmp_path, target, ["--run", "m"], known)[0]


# -- several processes ------------------------------------------------------------------------


def children() -> set[int | None]:
    """Processes that this one has started; earlier tests' may be among them."""
    return {child.pid for child in multiprocessing.active_children()}


@pytest.mark.slow
def test_a_mistake_in_a_child_process_is_one_line(tmp_path, capfd):
    command = ["train", "--target", str(fixtures.tiny_target()), "--work", str(tmp_path)]
    others = children()
    assert main([*command, *SHAPE, "--steps", "2", "--processes", "2"]) == 1
    assert "no usable feature shards" in line(capfd)
    assert children() <= others


@pytest.mark.parametrize(
    ("deed", "error", "text"),
    [
        ("fail", ValueError, "the disk is full"),
        pytest.param("kill", ValueError, "process 1 was ended by SIG", marks=pytest.mark.slow),
        ("wait", KeyboardInterrupt, None),
    ],
)
def test_no_child_is_left_behind(tmp_path, deed, error, text):
    def interrupt():
        while len(list(tmp_path.iterdir())) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    others = children()
    if deed == "wait":
        threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(error, match=text):
        run_all(one_of, (str(tmp_path), deed), 2)
    assert children() <= others
    assert signal.getsignal(signal.SIGINT) is before
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)
