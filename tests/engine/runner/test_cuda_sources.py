"""Which CUDA sources are compiled while weights are read."""

import re
from pathlib import Path
from typing import Any

import pytest

from capacity.shapes import EXPERTS, SHAPES
from engine.config import EngineConfig, SparsePrefillConfig
from engine.model.config import ModelConfig, parse_model_config
from engine.runner.cuda_sources import QUANTIZING, needed_sources
from engine.settings.device import Hardware, resolve
from kernels import __file__ as package
from tests.support.packed import CONFIGS

KERNELS = Path(package).parent
# Launched by transfers instead of models: the memory that a store's blocks go to prepares it.
OF_TRANSFERS = {"ghash/pieces"}


def names(model: ModelConfig, **settings: Any) -> set[str]:
    config = EngineConfig(model_dir=Path("model"), device="cuda", **settings)
    return {f"{each.parts[-3]}/{each.stem}" for each in needed_sources(model, resolve(config, Hardware(8, 1 << 30)))}


def shape(name: str, **changes: Any) -> ModelConfig:
    return parse_model_config({**SHAPES[name], **changes})


def test_a_plain_model_needs_no_products_of_other_formats() -> None:
    found = names(shape("moonlight"))
    assert {"mla_decode/bf16_decode", "mla_decode/few_heads", "mla_prefill/bf16_prefill", "norm/clusters"} <= found
    assert not any(each.startswith(("fp8_gemm", "w4a8_gemm", "nvfp4_gemm", "peer_exchange")) for each in found)


@pytest.mark.parametrize(
    ("model", "settings", "added"),
    [
        ("r1", {}, {"fp8_gemm/few_rows", "fp8_gemm/many_rows", "swiglu/bf16"}),
        ("moonlight", {"weights": "fp8"}, {"fp8_gemm/few_rows", "fp8_gemm/many_rows", "swiglu/bf16"}),
        ("moonlight", {"kv_dtype": "float8_e4m3fn"}, {"mla_decode/fp8_decode"}),
        (
            "moonlight",
            {"prompt_attention_dtype": "float8_e4m3fn"},
            {"mla_prefill/fp8_prefill", "mla_prefill/fp8_quantize"},
        ),
        ("moonlight", {"parallel": {"dp": 2}}, {"peer_exchange/gather", "peer_exchange/norm", "peer_exchange/reduce"}),
        ("moonlight", {"sparse_prefill": SparsePrefillConfig(recall=0.9)}, {"sparse_prefill/bf16_sparse_prefill"}),
    ],
    ids=["published in FP8", "quantized to FP8", "FP8 KV", "FP8 prompts", "two ranks", "sparse prompts"],
)
def test_formats_and_settings_add_their_sources(model: str, settings: dict[str, Any], added: set[str]) -> None:
    assert added <= names(shape(model), **settings) and not added & names(shape("moonlight"))


def test_a_model_in_float32_needs_none() -> None:
    assert names(shape("moonlight"), dtype="float32", weights="dequantized") == set()


def test_every_source_is_compiled_ahead_for_some_model() -> None:
    """A new source belongs in the list."""
    settings: list[dict[str, Any]] = [{}, {"kv_dtype": "float8_e4m3fn"}, {"prompt_attention_dtype": "float8_e4m3fn"}]
    settings += [{"parallel": {"dp": 2}}, {"sparse_prefill": SparsePrefillConfig(recall=0.9)}]
    models = [shape(name) for name in SHAPES]
    compressed = CONFIGS["compressed-tensors"]
    models += [shape("r1", quantization_config=experts) for experts in (*EXPERTS.values(), compressed)]
    models.append(shape("moonlight", v_head_dim=192))
    found = {each for model in models for given in settings for each in names(model, **given)}
    assert found | OF_TRANSFERS == {f"{each.parts[-3]}/{each.stem}" for each in KERNELS.glob("*/cuda/*.cu")}


def test_sources_that_make_scales_are_known_to_quantize() -> None:
    """They call what a macro makes round up, themselves or in a header."""

    def text_of(source: Path) -> str:
        text = source.read_text(encoding="utf-8")
        included = re.findall(r'^#include "(.+)"', text, re.MULTILINE)
        return "\n".join([text, *(text_of(source.parent / name) for name in included)])

    makers = re.compile(r"= (scale_of|scale_of_quad|scale_of_group)\(")
    found = {f"{each.parts[-3]}/{each.stem}" for each in KERNELS.glob("*/cuda/*.cu") if makers.search(text_of(each))}
    assert found == set(QUANTIZING)
