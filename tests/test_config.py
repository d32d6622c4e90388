"""What may be asked of a request, and what config.json may say: right values, and named errors."""

import json
import math
import subprocess
import sys

import pytest
from fixtures import (
    TINY,
    TINY_EOS,
    TINY_TAPS,
    edit_config,
    make_drafter,
    make_target,
    tiny_drafter,
    tiny_target,
)

from ddtree.config import SamplingParams, load_draft_config, load_target_config


def target_folder(tmp_path, **changes):
    """A folder with TINY's config.json, changed; None removes an entry."""
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((tiny_target() / name).read_bytes())
    edit_config(tmp_path, **changes)
    return tmp_path


def draft_config(tmp_path, **changes):
    """Load TINY's drafter's config.json after changes; dflash_config is merged, not replaced."""
    values = json.loads((tiny_drafter() / "config.json").read_text())
    dflash = values["dflash_config"] | changes.pop("dflash_config", {})
    values |= {**changes, "dflash_config": {k: v for k, v in dflash.items() if v is not None}}
    values = {key: value for key, value in values.items() if value is not None}
    (tmp_path / "config.json").write_text(json.dumps(values))
    return load_draft_config(tmp_path, load_target_config(tiny_target()))


# -- SamplingParams -------------------------------------------------------------------------------


def test_defaults_are_greedy_tree_decoding():
    params = SamplingParams()
    assert (params.max_new_tokens, params.temperature, params.speculation) == (256, 0.0, "tree")
    assert params.stop == () and params.stop_token_ids == () and params.budget is None


def test_values_are_normalised():
    params = SamplingParams(stop="end", stop_token_ids=[3, 4], budget=0, temperature=0)
    assert params.stop == ("end",) and params.stop_token_ids == (3, 4) and params.budget == 0
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(max_new_tokens=0).max_new_tokens == 0


def test_params_are_frozen():
    with pytest.raises(AttributeError):
        SamplingParams().max_new_tokens = 3


def test_unknown_field_is_a_type_error():
    with pytest.raises(TypeError, match="max_tokens"):
        SamplingParams(max_tokens=3)


BAD = [
    ("max_new_tokens", [-1, 1.5, "3", None, True]),
    ("temperature", [-0.1, 1001, 1e38, 10**400, math.nan, math.inf, "0", None, False]),
    ("top_k", [-1, 0.5, None, True]),
    ("top_p", [0.0, -0.5, 1.01, math.nan, "1"]),
    ("min_p", [-0.1, 1.1, None]),
    ("seed", [0.5, "1", True, 2**64]),
    ("stop", [3, [3], [""], "", None, ["a", None]]),
    ("stop_token_ids", [3, "3", ["3"], [-1], [1.0], [True], None]),
    ("ignore_eos", [1, None, "yes"]),
    ("min_new_tokens", [-1, 0.5, 300]),
    ("presence_penalty", [-2.1, 2.1, "1"]),
    ("frequency_penalty", [-2.1, 2.1, math.nan]),
    ("repetition_penalty", [0.0, -1.0, 1e-9, 101, 10**400, math.inf]),
    ("logit_bias", [[1], {"a": 1.0}, {1: "a"}, {-1: 1.0}, {1: math.nan}]),
    ("logprobs", [-1, 21, True, 1.0]),
    ("speculation", ["Tree", "", None, True]),
    ("budget", [-1, 1.5, "auto", True]),
    ("skip_special_tokens", [None, 0]),
    ("include_stop_str_in_output", ["no"]),
    ("trace", [1]),
]


@pytest.mark.parametrize("name,value", [(name, value) for name, many in BAD for value in many])
def test_bad_value_is_an_error_that_names_the_field(name, value):
    with pytest.raises(ValueError, match=rf"^{name}: "):
        SamplingParams(**{name: value})


def test_every_field_has_bad_values_above():
    assert {name for name, _ in BAD} == set(SamplingParams.__dataclass_fields__)


# -- target ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
def test_target_shapes(architecture):
    config = load_target_config(make_target(architecture, tie_word_embeddings=True))
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (101, 64, 96)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (4, 8, 2)
    assert config.head_dim == TINY["head_dim"] and config.max_position_embeddings == 512
    assert config.qk_norm == (architecture == "qwen3") and config.tie_word_embeddings
    assert config.torch_dtype == "float32" and not config.attention_bias and not config.mlp_bias


def test_eos_ids_come_from_the_generation_config(tmp_path):
    folder = target_folder(tmp_path, eos_token_id=5)
    assert load_target_config(folder).eos_token_ids == tuple(TINY_EOS)
    edit_config(folder, "generation_config.json", eos_token_id=7)
    assert load_target_config(folder).eos_token_ids == (7,)


def test_eos_ids_fall_back_to_the_config(tmp_path):
    folder = target_folder(tmp_path, eos_token_id=[5, 6])
    edit_config(folder, "generation_config.json", eos_token_id=None)
    assert load_target_config(folder).eos_token_ids == (5, 6)
    (folder / "generation_config.json").unlink()
    assert load_target_config(folder).eos_token_ids == (5, 6)


def test_head_dim_defaults_to_an_even_share(tmp_path):
    assert load_target_config(target_folder(tmp_path, head_dim=None)).head_dim == 8


@pytest.mark.parametrize(
    "changes,match",
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM, Qwen3For"),
        ({"architectures": None}, "architecture .*none in config.json"),
        ({"model_type": "mistral"}, "goes with model_type 'llama'.*'mistral'"),
        ({"auto_map": {"AutoModelForCausalLM": "x.X"}}, "auto_map .*never run"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "needs a factor|factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"num_key_value_heads": 3}, "num_attention_heads 8 is not a multiple"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"vocab_size": 60}, "eos_token_id 99"),
    ],
)
def test_target_refusals(tmp_path, changes, match):
    with pytest.raises(ValueError, match=match):
        load_target_config(target_folder(tmp_path, **changes))


def test_sliding_target_layers_are_refused():
    folder = make_target("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=2)
    with pytest.raises(ValueError, match="layer_types"):
        load_target_config(folder)


def test_folder_without_config(tmp_path):
    with pytest.raises(ValueError, match=r"not a checkpoint folder.*config\.json"):
        load_target_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load_target_config(tmp_path)


def test_nothing_heavy_is_imported_with_the_configuration():
    code = (
        "import sys, ddtree.config;"
        "sys.exit(any(name in sys.modules for name in ('transformers', 'huggingface_hub')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# -- drafter --------------------------------------------------------------------------------------


def test_draft_shapes():
    config = load_draft_config(tiny_drafter(), load_target_config(tiny_target()))
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 4, 2)
    assert (config.block_size, config.depth, config.mask_token_id) == (6, 5, 98)
    assert config.target_layer_ids == TINY_TAPS and config.qk_norm
    assert config.layer_views == (("full", 0), ("full", 0))
    assert config.input_embedding_scale == 1.0


def test_block_size_and_mask_id_on_either_level(tmp_path):
    config = draft_config(
        tmp_path, block_size=None, dflash_config={"block_size": 4, "mask_token_id": 3}
    )
    assert (config.block_size, config.mask_token_id) == (4, 3)
    config = draft_config(
        tmp_path, block_size=8, mask_token_id=9, dflash_config={"mask_token_id": None}
    )
    assert (config.block_size, config.mask_token_id) == (8, 9)


def test_how_many_tokens_are_drafted(tmp_path):
    assert draft_config(tmp_path).draft_vocab_size is None
    assert draft_config(tmp_path, draft_vocab_size=9).draft_vocab_size == 9
    assert draft_config(tmp_path, dflash_config={"draft_vocab_size": 9}).draft_vocab_size == 9
    assert draft_config(tmp_path, draft_vocab_size=101).draft_vocab_size == 101


def test_published_drafters_auto_map_is_tolerated(tmp_path):
    assert draft_config(tmp_path, auto_map={"AutoModel": "dflash.DFlashDraftModel"}).depth == 5


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
    "changes,views",
    [
        ({}, [("full", 0), ("full", 0)]),
        ({"layer_types": [FULL, FULL]}, [("full", 0), ("full", 0)]),
        ({"layer_types": [SLIDING, FULL], "sliding_window": 7}, [("causal", 7), ("full", 0)]),
        (
            {"layer_types": [SLIDING, FULL], "sliding_window": 7, "is_causal": False},
            [("full", 7), ("full", 0)],
        ),
        (
            {"layer_types": [SLIDING, FULL], "sliding_window": 7, "is_causal": True},
            [("causal", 7), ("causal", 0)],
        ),
        ({"dflash_config": {"is_causal": True}}, [("causal", 0), ("causal", 0)]),
        ({"dflash_config": {"causal": True}}, [("causal", 0), ("causal", 0)]),
        ({"dflash_config": {"causal_head": True}}, [("causal", 0), ("causal", 0)]),
        ({"is_causal": False, "dflash_config": {"causal_head": True}}, [("full", 0), ("full", 0)]),
        (
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
            [("full", 0), ("causal", 9)],
        ),
        ({"use_sliding_window": True, "sliding_window": 9}, [("full", 0), ("full", 0)]),
        ({"use_sliding_window": False, "sliding_window": 9}, [("full", 0), ("full", 0)]),
        (
            {"use_sliding_window": False, "sliding_window": 9, "layer_types": [SLIDING, FULL]},
            [("causal", 0), ("full", 0)],
        ),
    ],
)
def test_draft_views(tmp_path, changes, views):
    assert list(draft_config(tmp_path, **changes).layer_views) == views


@pytest.mark.parametrize(
    "changes,match",
    [
        ({"architectures": ["DFlash2DraftModel"]}, "DFlash2DraftModel.*only DFlashDraftModel"),
        ({"dflash_config": {"target_layer_ids": None}}, r"dflash_config\.target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": []}}, r"dflash_config\.target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": ["1"]}}, r"dflash_config\.target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": [1, 4]}}, r"target_layer_ids .*0\.\.3.*\[1, 4\]"),
        ({"dflash_config": {"target_layer_ids": [-1]}}, "target_layer_ids"),
        ({"dflash_config": {"mask_token_id": None}}, "mask_token_id"),
        ({"dflash_config": {"mask_token_id": 101}}, r"mask_token_id .*0\.\.100, got 101"),
        ({"dflash_config": {"mask_token_id": -1}}, "mask_token_id"),
        ({"block_size": None}, "block_size"),
        ({"block_size": 1}, "block_size"),
        ({"hidden_size": 32}, "hidden_size 32 differs from the target's 64"),
        ({"layer_types": [SLIDING]}, "layer_types"),
        ({"layer_types": ["chunked_attention", FULL]}, "layer_types"),
        ({"layer_types": [SLIDING, FULL]}, "sliding_window"),
        ({"is_causal": "yes"}, "is_causal"),
        ({"dflash_config": {"input_embedding_scale": 0}}, "input_embedding_scale"),
        ({"dflash_config": {"final_logit_softcapping": 20.0}}, "final_logit_softcapping"),
        ({"dflash_config": {"output_multiplier": 0.2}}, "output_multiplier"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "RoPE type 'longrope'"),
        ({"hidden_act": "relu"}, "hidden_act"),
        ({"head_dim": 15}, "head_dim must be even"),
        ({"draft_vocab_size": 102}, "draft_vocab_size must be at most .* 101, got 102"),
        ({"draft_vocab_size": 0}, "draft_vocab_size .* integer >= 1, got 0"),
        ({"dflash_config": {"draft_vocab_size": "7"}}, "draft_vocab_size .* integer >= 1"),
    ],
)
def test_draft_refusals(tmp_path, changes, match):
    with pytest.raises(ValueError, match=f"draft: .*{match}"):
        draft_config(tmp_path, **changes)


def test_draft_rope_in_both_shapes(tmp_path):
    scaled = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    old = draft_config(tmp_path, rope_theta=7.0e4, rope_scaling=scaled)
    new = draft_config(tmp_path, rope_theta=None, rope_parameters={**scaled, "rope_theta": 7.0e4})
    assert old.rope == new.rope and old.rope.type == "yarn" and old.rope.theta == 7.0e4


def test_drafter_of_another_target_is_refused():
    folder = make_drafter(make_target(hidden_size=48, num_hidden_layers=4))
    with pytest.raises(ValueError, match="another target"):
        load_draft_config(folder, load_target_config(tiny_target()))
