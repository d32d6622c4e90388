"""Loading: every tensor accounted for, one named error per defect, memory, no code executed."""

import json
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from fixtures import edit_config, make_drafter, make_target, tiny_drafter, tiny_target
from safetensors.torch import load_file, save_file

from ddtree.config import load_target_config
from ddtree.kernels import get_ops
from ddtree.models.loader import INDEX_FILE, SINGLE_FILE, Checkpoint, resolve
from ddtree.models.registry import build_drafter, build_target

CPU = torch.device("cpu")
OPS = get_ops("torch", CPU)


def load(folder, dtype=torch.float32, **options):
    return build_target(folder, OPS, CPU, dtype, **options)


def load_drafter(folder):
    return build_drafter(folder, load_target_config(tiny_target()), OPS, CPU, torch.float32)


def edit_weights(folder, file=SINGLE_FILE, drop=(), **changes):
    """Drop tensors from a safetensors file, or set some (underscores stand for dots)."""
    tensors = load_file(folder / file)
    for name in drop:
        del tensors[name]
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file(tensors, folder / file, metadata={"format": "pt"})


@pytest.fixture
def single(tmp_path):
    return make_target(folder=tmp_path)


@pytest.fixture
def sharded(tmp_path):
    folder = make_target(folder=tmp_path, shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


# -- what loads -----------------------------------------------------------------------------------


def test_shards_give_the_same_model_as_one_file(sharded):
    tokens = torch.arange(5)[None]
    one, many = load(tiny_target()), load(sharded)
    torch.testing.assert_close(many.embed(tokens), one.embed(tokens), atol=0, rtol=0)
    hidden = torch.randn(3, 64)
    torch.testing.assert_close(many.logits(hidden), one.logits(hidden), atol=0, rtol=0)
    for a, b in zip(one.layers, many.layers, strict=True):
        x, y = torch.randn(2, 64), torch.randn(2, 96)
        for module, value in (("attention.qkv", x), ("mlp.gate_up", x), ("mlp.down", y)):
            left, right = attrgetter(module)(a), attrgetter(module)(b)
            torch.testing.assert_close(left(value), right(value), atol=0, rtol=0)


def test_stacked_weights_are_the_checkpoints_rows(single):
    weights = load_file(single / SINGLE_FILE)
    names = [f"model.layers.2.self_attn.{part}_proj.weight" for part in "qkv"]
    x = torch.randn(7, 64)
    expected = x @ torch.cat([weights[name] for name in names]).T
    torch.testing.assert_close(load(single).layers[2].attention.qkv(x), expected)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_weights_are_converted(tmp_path, stored, wanted):
    folder = make_target(folder=tmp_path, dtype=stored)
    model = load(folder, wanted)
    assert model.embedding.dtype == wanted == model.dtype
    expected = load_file(folder / SINGLE_FILE)["model.embed_tokens.weight"].to(wanted)
    torch.testing.assert_close(model.embedding, expected, atol=0, rtol=0)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_tied_weights_are_converted(tmp_path, stored, wanted):
    """The embedding may stay in the file, in its dtype: rows and head are the same anyway."""
    folder = make_target(folder=tmp_path, dtype=stored, tie_word_embeddings=True)
    model = load(folder, wanted)
    table = load_file(folder / SINGLE_FILE)["model.embed_tokens.weight"].to(wanted)
    tokens, hidden = torch.arange(101)[None], torch.randn(3, 64).to(wanted)
    assert model.embed(tokens).dtype == wanted
    torch.testing.assert_close(model.embed(tokens)[0], table, atol=0, rtol=0)
    torch.testing.assert_close(model.logits(hidden), (hidden @ table.T).float())
    if wanted == torch.bfloat16:
        assert model.head.weight is model.embedding


def test_redundant_tensors_are_ignored(tmp_path):
    """Old checkpoints carry rotary tables; tied ones may carry the head as well."""
    folder = make_target(folder=tmp_path, tie_word_embeddings=True)
    edit_weights(
        folder,
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(12),
        lm_head__weight=torch.zeros(101, 64),
    )
    hidden = torch.randn(2, 64)
    torch.testing.assert_close(load(folder).logits(hidden), hidden @ load(folder).embedding.T)


def test_a_tied_head_of_another_shape_is_an_error(tmp_path):
    folder = make_target(folder=tmp_path, tie_word_embeddings=True)
    edit_weights(folder, lm_head__weight=torch.zeros(103, 64))
    with pytest.raises(ValueError, match=r"lm_head\.weight has shape \[103, 64\].*\[101, 64\]"):
        load(folder)


def test_progress_bar_on_request_only(capsys):
    load(tiny_target())
    assert capsys.readouterr().err == ""
    load(tiny_target(), progress=True)
    assert "loading" in capsys.readouterr().err


# -- what does not --------------------------------------------------------------------------------


def test_missing_shard(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ValueError, match=f"shard {shard.name} is missing"):
        load(sharded)


def test_truncated_shard(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(ValueError, match=f"{shard.name} is not a whole safetensors file"):
        load(sharded)


def test_stray_tensor(single):
    edit_weights(single, model__layers__9__extra__weight=torch.zeros(3))
    with pytest.raises(ValueError, match=r"no place for tensor model\.layers\.9\.extra\.weight"):
        load(single)


def test_bias_of_a_model_without_biases_is_stray(single):
    edit_weights(single, model__layers__0__self_attn__q_proj__bias=torch.zeros(192))
    with pytest.raises(ValueError, match=r"no place for tensor .*q_proj\.bias"):
        load(single)


def test_dropped_tensor(single):
    edit_weights(single, drop=["model.layers.1.mlp.up_proj.weight"])
    with pytest.raises(
        ValueError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing.*\[96, 64\]"
    ):
        load(single)


def test_tensor_that_its_shard_lacks(sharded):
    weight_map = json.loads((sharded / INDEX_FILE).read_text())["weight_map"]
    name = "model.layers.2.mlp.down_proj.weight"
    edit_weights(sharded, weight_map[name], drop=[name])
    with pytest.raises(ValueError, match=rf"{weight_map[name]}: tensor {name} is missing"):
        load(sharded)


def test_tensor_that_the_index_lacks(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[0].name
    edit_weights(sharded, shard, surplus=torch.zeros(2))
    with pytest.raises(ValueError, match=rf"{shard}: tensor surplus is not in"):
        load(sharded)


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": 3}', "[]"])
def test_broken_index(sharded, content):
    (sharded / INDEX_FILE).write_text(content)
    with pytest.raises(ValueError, match=r"index\.json has no valid weight_map"):
        load(sharded)


def test_index_that_points_out_of_the_folder(sharded):
    (sharded / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(ValueError, match="not a plain file name"):
        load(sharded)


def test_untied_head_missing(single):
    edit_weights(single, drop=["lm_head.weight"])
    with pytest.raises(
        ValueError, match=r"lm_head\.weight is missing, and .*tie_word_embeddings is false"
    ):
        load(single)


def test_pickles_only(single):
    (single / SINGLE_FILE).rename(single / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"only safetensors.*pytorch_model\.bin"):
        load(single)


def test_no_weights(single):
    (single / SINGLE_FILE).unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        load(single)


def test_shape_mismatch(single):
    edit_weights(single, model__layers__3__self_attn__o_proj__weight=torch.zeros(64, 64))
    with pytest.raises(
        ValueError, match=r"layers\.3\.self_attn\.o_proj\.weight has shape \[64, 64\].*\[64, 192\]"
    ):
        load(single)


def test_quantized_weights(single):
    weight = torch.zeros(64, 192, dtype=torch.int8)
    edit_weights(single, model__layers__3__self_attn__o_proj__weight=weight)
    with pytest.raises(ValueError, match=r"o_proj\.weight is stored as I8"):
        load(single)


def test_unknown_architecture(single):
    edit_config(single, architectures=["MistralForCausalLM"])
    with pytest.raises(
        ValueError, match="MistralForCausalLM is not supported, only LlamaForCausalLM, Qwen3"
    ):
        load(single)


# -- drafter --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fc.weight", "norm.weight", "layers.1.self_attn.k_norm.weight"])
def test_dropped_drafter_tensor(tmp_path, name):
    folder = make_drafter(tiny_target(), folder=tmp_path)
    edit_weights(folder, drop=[name])
    with pytest.raises(ValueError, match=f"tensor {name} is missing"):
        load_drafter(folder)


def test_stray_drafter_tensor(tmp_path):
    folder = make_drafter(tiny_target(), folder=tmp_path, prefix="model.")
    edit_weights(folder, model__markov_head__weight=torch.zeros(2))
    with pytest.raises(ValueError, match=r"no place for tensor markov_head\.weight"):
        load_drafter(folder)


def test_drafter_tensor_with_and_without_prefix(tmp_path):
    folder = make_drafter(tiny_target(), folder=tmp_path)
    edit_weights(folder, model__norm__weight=torch.zeros(64))
    with pytest.raises(ValueError, match=r"norm\.weight is there with and without 'model\.'"):
        load_drafter(folder)


def test_drafter_with_other_taps_than_its_projection(tmp_path):
    folder = make_drafter(tiny_target(), folder=tmp_path)
    edit_config(folder, dflash_config={"target_layer_ids": [0, 1], "mask_token_id": 98})
    with pytest.raises(ValueError, match=r"fc\.weight has shape \[64, 192\], expected \[64, 128\]"):
        load_drafter(folder)


def test_drafter_mask_id_out_of_range(tmp_path):
    folder = make_drafter(tiny_target(), folder=tmp_path, mask_token_id=101)
    with pytest.raises(ValueError, match=r"mask_token_id .*0\.\.100, got 101"):
        load_drafter(folder)


def test_drafter_without_target_layer_ids(tmp_path):
    folder = make_drafter(tiny_target(), folder=tmp_path)
    edit_config(folder, dflash_config={"mask_token_id": 98})
    with pytest.raises(ValueError, match=r"dflash_config\.target_layer_ids"):
        load_drafter(folder)


# -- nothing from the folder is executed ----------------------------------------------------------

PLANTED = """
from pathlib import Path
Path({mark!r}).write_text("executed")
class Anything:
    def __init__(self, *args, **kwargs): pass
    from_pretrained = classmethod(lambda cls, *args, **kwargs: cls())
"""


def plant(folder, mark):
    """Put code beside the weights under every name that a loader might import or unpickle."""
    for name in ("modeling_x", "configuration_x", "dflash", "__init__", "setup", "conftest"):
        (folder / f"{name}.py").write_text(PLANTED.format(mark=str(mark)))
    edit_config(
        folder,
        auto_map={
            "AutoConfig": "configuration_x.Anything",
            "AutoModel": "dflash.Anything",
            "AutoModelForCausalLM": "modeling_x.Anything",
        },
    )


def test_remote_code_of_a_target_is_refused_and_not_run(single, tmp_path_factory):
    mark = tmp_path_factory.mktemp("mark") / "executed"
    plant(single, mark)
    with pytest.raises(ValueError, match=r"auto_map .*never run"):
        load(single)
    edit_config(single, architectures=["XForCausalLM"], model_type="x")
    with pytest.raises(ValueError, match=r"XForCausalLM is not supported.*auto_map.*never run"):
        load(single)
    assert not mark.exists()


def test_remote_code_of_a_drafter_is_not_run(tmp_path, tmp_path_factory):
    """Published drafters carry auto_map: they load, by our own implementation."""
    mark = tmp_path_factory.mktemp("mark") / "executed"
    folder = make_drafter(tiny_target(), folder=tmp_path)
    plant(folder, mark)
    load_drafter(folder)
    assert not mark.exists()


def test_the_planted_code_would_leave_a_mark(tmp_path):
    exec(PLANTED.format(mark=str(tmp_path / "executed")), {})
    assert (tmp_path / "executed").exists()


# -- finding the folder ---------------------------------------------------------------------------


def test_a_folder_is_taken_as_it_is(single):
    assert resolve(str(single)) == single == resolve(single)


def test_neither_folder_nor_hub_id():
    for name in ("/no/such/folder", "a/b/c", "", "../x"):
        with pytest.raises(ValueError, match=r"target: .*neither a folder nor a hub id"):
            resolve(name)
    with pytest.raises(ValueError, match="draft: expected a folder or a hub id, got 3"):
        resolve(3, name="draft")


def test_a_hub_id_that_is_not_in_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="target: 'nobody/nothing' is not a folder, and not found"):
        resolve("nobody/nothing", local_files_only=True)


def test_only_weights_and_tokenizer_files_are_fetched(monkeypatch, tmp_path):
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    asked = {}

    def fake(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    assert resolve("owner/name", revision="abc", local_files_only=True) == tmp_path
    assert (asked["repo_id"], asked["revision"]) == ("owner/name", "abc")
    assert asked["local_files_only"] is True
    wanted = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    wanted += [
        "tokenizer.json",
        "tokenizer.model",
        "merges.txt",
        "vocab.json",
        "chat_template.jinja",
    ]
    unwanted = ["dflash.py", "pytorch_model.bin", "model.pt", "onnx/model.safetensors", "README.md"]
    kept = filter_repo_objects(
        wanted + unwanted,
        allow_patterns=asked["allow_patterns"],
        ignore_patterns=asked["ignore_patterns"],
    )
    assert list(kept) == wanted


# -- memory ---------------------------------------------------------------------------------------

MEASURE = """
import re, sys, torch
from pathlib import Path
from transformers import AutoConfig
from ddtree.kernels import get_ops
from ddtree.models.registry import build_target
def memory(field):
    status = Path("/proc/self/status").read_text()
    return int(re.search(field + r":\\s+(\\d+) kB", status)[1]) * 1024
torch.set_num_threads(1)
folder, device = sys.argv[1], torch.device("cpu")
AutoConfig.from_pretrained(folder)
ops = get_ops("torch", device)
before = memory("VmRSS")
model = build_target(folder, ops, device, getattr(torch, sys.argv[2]))
print(memory("VmHWM") - before)
"""


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """Targets of 300 to 350 MB in float32: untied in one file and in shards, and a tied one."""
    shapes = {
        "vocab_size": 16000,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 10,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
    }
    folders = {}
    for name, size in (("one file", "5GB"), ("shards", "100MB"), ("tied", "5GB")):
        folders[name] = make_target(
            folder=tmp_path_factory.mktemp("big"),
            shard_size=size,
            tie_word_embeddings=name == "tied",
            **shapes,
        )
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["one file", "shards", "tied"])
def test_peak_memory_is_little_more_than_the_weights(big, kind, dtype):
    files = big[kind].glob("*.safetensors")
    weights = sum(path.stat().st_size for path in files) // (2 if dtype == "bfloat16" else 1)
    command = [sys.executable, "-c", MEASURE, str(big[kind]), dtype]
    root = Path(__file__).parents[1]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    peak = int(result.stdout)
    print(f"peak {peak / 1e6:.0f} MB for {weights / 1e6:.0f} MB of weights")
    assert 0.9 * weights < peak <= 1.2 * weights


def test_the_checkpoint_is_not_kept_open(single):
    """Nothing of the folder stays mapped: its pages would count as the process's memory."""
    model = load(single)
    mapped = Path("/proc/self/maps").read_text()
    assert str(single) not in mapped
    assert model.embedding.untyped_storage().nbytes() == model.embedding.numel() * 4


def test_a_failed_load_reports_its_own_error_only(single):
    """What was not read yet when the load failed is not called stray."""
    with pytest.raises(KeyError), Checkpoint(single, OPS, CPU, torch.float32):
        raise KeyError("the load's own error")


def test_unread_tensors_are_counted(tmp_path):
    save_file({f"t{i}": torch.zeros(1) for i in range(8)}, tmp_path / SINGLE_FILE)
    with (
        pytest.raises(ValueError, match=r"no place for tensor t1, t2, t3, t4, t5 and 2 more"),
        Checkpoint(tmp_path, OPS, CPU, torch.float32) as checkpoint,
    ):
        checkpoint.read("t0", (1,))


def test_the_drafter_of_another_architecture_is_refused(tmp_path):
    folder = make_drafter(tiny_target(), folder=tmp_path, architectures=["EagleModel"])
    with pytest.raises(ValueError, match="EagleModel is not supported, only DFlashDraftModel"):
        load_drafter(folder)
    assert load_drafter(tiny_drafter()).config.block_size == 6
