"""Models of DeepSeek-V3's family against transformers' own classes in float32."""

from pathlib import Path

import pytest

from engine.model.config import parse_model_config
from mesh.errors import CheckpointError
from tests.support.checkpoints import generate, model_backend, random_prompt, tiny_checkpoint
from tests.support.family import FAMILY
from tests.support.oracle_model import (
    assert_greedy,
    load_oracle_of_family,
    oracle_logits,
    our_logits,
    relative_error,
)
from tools.make_checkpoint import checkpoint_config

BLOCKS = [5, 2, 9]


@pytest.mark.parametrize("model", FAMILY)
def test_logits_and_greedy_tokens_are_those_of_transformers(model: str, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, **FAMILY[model])
    oracle, prompt = load_oracle_of_family(checkpoint), random_prompt(130)
    found = our_logits(checkpoint, prompt, BLOCKS, [70, 58, 1, 1])
    assert relative_error(found, oracle_logits(oracle, prompt)) < 1e-5
    assert_greedy(oracle, prompt[:40], generate(model_backend(checkpoint), prompt[:40], 20, BLOCKS))


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        ({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, "LlamaForCausalLM: deepmesh serves Deepseek"),
        ({"scoring_func": "softmax"}, "'softmax' with topk_method 'noaux_tc' is not supported"),
        ({"scoring_func": "softmax", "topk_method": "greedy"}, "norm_topk_prob is true"),
        ({"mlp_layer_types": ["sparse", "dense", "sparse"]}, "expected dense layers and then sparse ones"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
    ],
    ids=["architecture", "gate", "normalized softmax", "layer types", "rotary"],
)
def test_what_is_not_computed_is_refused_by_name(overrides: dict[str, object], complaint: str) -> None:
    config = checkpoint_config("tiny", overrides={})
    with pytest.raises(CheckpointError, match=complaint):
        parse_model_config(config | overrides)
