import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.model.config import parse_model_config, read_model_config
from engine.model.model import model_rotations
from engine.model.quantization import Quantization, Stored
from mesh.errors import CheckpointError
from tests.support.checkpoints import tiny_checkpoint
from tools.make_checkpoint import checkpoint_config

YARN = {"type": "yarn", "factor": 40}


def published(**changes: Any) -> dict[str, Any]:
    return checkpoint_config("small") | changes


def as_transformers_4(values: dict[str, Any]) -> dict[str, Any]:
    values = dict(values)
    scaling = values["rope_scaling"]
    values["rope_scaling"] = scaling | {"rope_type": scaling["type"], "factor": float(scaling["factor"])}
    for dropped in ("scoring_func", "topk_method", "moe_layer_freq"):
        del values[dropped]
    return values | {"rope_interleave": True, "qk_head_dim": 192, "head_dim": 64}


def as_transformers_5(values: dict[str, Any]) -> dict[str, Any]:
    values = as_transformers_4(values)
    scaling = values.pop("rope_scaling")
    del scaling["type"]
    values["rope_parameters"] = scaling | {"rope_theta": float(values.pop("rope_theta"))}
    values["dtype"] = values.pop("torch_dtype")
    return values


def test_all_three_forms_describe_the_same_model() -> None:
    values = published()
    expected = parse_model_config(values)
    assert expected.yarn is not None and expected.yarn.factor == 8
    assert parse_model_config(as_transformers_4(values)) == expected
    assert parse_model_config(as_transformers_5(values)) == expected


def test_a_model_without_rope_scaling_has_no_yarn() -> None:
    assert parse_model_config(published(rope_scaling=None)).yarn is None
    assert parse_model_config(published(rope_scaling=None)).softmax_scale == 192**-0.5


def test_yarn_scales_softmax_by_its_squared_magnitude() -> None:
    config = parse_model_config(published())
    assert config.softmax_scale == pytest.approx(192**-0.5 * (0.1 * 2.0794415 + 1) ** 2)


SCALINGS = {
    "published": {"mscale": 1.0, "mscale_all_dim": 1.0},
    "neither magnitude": {},
    "of rotations alone": {"mscale": 1.0},
    "an attention factor": {"mscale": 0.7, "attention_factor": 1.3},
    "a shorter pretraining": {"original_max_position_embeddings": 512},
}


@pytest.mark.parametrize("keys", [pytest.param(keys, id=name) for name, keys in SCALINGS.items()])
def test_rotations_are_scaled_as_in_transformers(keys: dict[str, Any]) -> None:
    values = published(rope_scaling=YARN | keys, original_max_position_embeddings=2048)
    expected, scale = ROPE_INIT_FUNCTIONS["yarn"](DeepseekV3Config(**values), torch.device("cpu"))
    found = model_rotations(parse_model_config(values), 2, torch.device("cpu"))
    assert torch.allclose(found[0].abs(), torch.full_like(expected, scale))
    assert torch.allclose(found[1].angle(), expected)


def test_the_language_model_of_kimi_k25_is_described() -> None:
    # config.json of moonshotai/Kimi-K2.5 on the Hugging Face Hub.
    path = Path(__file__).parent / "published" / "kimi-k2.5.json"
    config = parse_model_config(json.loads(path.read_text(encoding="utf-8")))
    assert (config.num_hidden_layers, config.n_routed_experts, config.vocab_size) == (61, 384, 163_840)
    assert config.yarn is not None and config.yarn.factor == 64 and config.eos_token_ids == {163_585}
    assert config.quantization == Quantization(experts=Stored.INT4, group=32, compressed=True)


def test_a_model_that_sees_must_have_a_language_model() -> None:
    with pytest.raises(CheckpointError, match="KimiK25ForConditionalGeneration has no text_config: only its text"):
        parse_model_config({"architectures": ["KimiK25ForConditionalGeneration"], "vision_config": {}})


def test_queries_without_a_low_rank_have_none() -> None:
    assert parse_model_config(published(q_lora_rank=None)).q_lora_rank is None


def test_the_generation_configurations_end_of_sequence_ids_win(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 4]}')
    assert read_model_config(tmp_path).eos_token_ids == {1, 4}


def test_wrong_ids_of_the_generation_configuration_name_it(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": -5}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id is -5"):
        read_model_config(tmp_path)


def test_published_fp8_checkpoints_are_recognized() -> None:
    values = checkpoint_config("small", dtype="float8")
    assert parse_model_config(values).quantization == Quantization(linear=Stored.FP8, experts=Stored.FP8)
    with_powers = {**values["quantization_config"], "scale_fmt": "ue8m0"}
    found = parse_model_config(values | {"quantization_config": with_powers})
    assert found.quantization == Quantization(linear=Stored.FP8, experts=Stored.FP8, power_scales=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "unsupported architecture LlamaForCausalLM"),
        ({"model_type": None, "architectures": None}, "unsupported architecture nothing"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax' with topk_method 'noaux_tc'"),
        ({"topk_method": "greedy"}, "scoring_func 'sigmoid' with topk_method 'greedy'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope scaling 'linear'"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "quantization 'aqlm'"),
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, "weight_block_size"),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "e5m2"}},
            "scale_fmt is e5m2",
        ),
        ({"hidden_size": "wide"}, "hidden_size is 'wide'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"routed_scaling_factor": "much"}, "routed_scaling_factor is 'much'"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": YARN | {"mscale": 0.7}}, "mscale 0.7 and mscale_all_dim 0"),
        ({"rope_scaling": YARN | {"mscale": 0, "mscale_all_dim": 1}}, "mscale 0 and mscale_all_dim 1"),
        ({"rope_scaling": YARN | {"attention_factor": 0}}, "attention_factor above 0"),
        ({"rope_scaling": YARN | {"truncate": "no"}}, "rope_scaling.truncate is 'no'"),
        ({"rope_scaling": YARN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn': expected keys and values"),
        ({"rope_theta": 0}, "rope_theta is 0"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"q_lora_rank": 33}, "q_lora_rank 33 is odd"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds the 8"),
        ({"topk_group": 5}, "topk_group 5 exceeds n_group 4"),
    ],
)
def test_what_is_not_computed_here_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_model_config(published(**changes))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 300) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
)


@given(st.dictionaries(st.sampled_from(sorted(published())), json_values, max_size=3))
def test_any_configuration_is_parsed_or_refused(changes: dict[str, Any]) -> None:
    try:
        config = parse_model_config(published(**changes))
    except CheckpointError as error:
        assert error.message
    else:
        assert config.softmax_scale > 0 and config.n_routed_experts >= config.num_experts_per_tok


def test_a_directory_without_config_json_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_model_config(tmp_path)


@pytest.mark.parametrize("text", ["{", "[" * 100_000], ids=["unfinished", "deep"])
def test_an_error_in_json_names_the_file(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json"):
        read_model_config(tmp_path)


def test_a_config_of_another_encoding_is_reported_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes('{"name": "Straße"}'.encode("iso-8859-1"))
    with pytest.raises(CheckpointError, match=r"cannot read .*config\.json: it is no text in UTF-8"):
        read_model_config(tmp_path)
