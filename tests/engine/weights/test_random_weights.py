import json
from pathlib import Path

import pytest
import torch

from engine.backend import execute
from engine.batch import Batch, Row
from engine.config import EngineConfig
from engine.model.activations import InputForm
from engine.model.config import read_model_config
from engine.model.parameters import whole
from engine.model.quantization import KeptWeights, LinearKind
from engine.runner.backend import ModelBackend
from engine.settings.device import Hardware, resolve
from engine.weights.loading import make_allocator, random_model
from engine.weights.random_weights import fill_randomly
from kernels.act_quant import quantize
from kernels.fp8_gemm import make_workspace
from mesh.domain.sampling import Sampling
from tests.support.packed import CONFIGS
from tools.make_checkpoint import checkpoint_config

WIDTHS = {
    "hidden_size": 256,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
}


def write_config(directory: Path, form: str = "float8") -> Path:
    config = checkpoint_config("tiny", dtype="float8", overrides=dict(WIDTHS))
    if form == "groups of 32":
        config["quantization_config"] = CONFIGS["compressed-tensors"]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("weights", ["dequantized", "quantized"])
@pytest.mark.parametrize("form", ["float8", "groups of 32"])
def test_every_weight_is_drawn_and_finite(form: str, tmp_path: Path, weights: KeptWeights) -> None:
    model = random_model(write_config(tmp_path, form), torch.bfloat16, torch.device("cpu"), weights)
    for parameter in model.parameters():
        values = parameter.place.float()
        assert values.isfinite().all(), parameter.name
        assert values.any() or parameter.name.endswith("bias"), parameter.name


def test_matrices_keep_the_magnitude_of_what_they_multiply(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    config = read_model_config(write_config(tmp_path))
    projection = make_allocator(config, torch.bfloat16, cpu, "quantized").linear(LinearKind.OUTPUT, 256, (256,))
    assert projection.input_form is InputForm.FP8_GROUPS
    fill_randomly(projection.parameters("projection"), cpu)
    out = projection.forward(quantize(torch.randn(64, 256)), make_workspace(cpu))
    assert 0.8 < float(out.float().std()) < 1.25


def test_an_embedding_has_the_magnitude_of_activations() -> None:
    place = torch.empty(64, 256)
    fill_randomly([whole("model.embed_tokens.weight", place)], torch.device("cpu"))
    assert 0.9 < float(place.std()) < 1.1


def test_a_backend_needs_no_checkpoint_for_them(tmp_path: Path) -> None:
    config = EngineConfig(model_dir=write_config(tmp_path), random_weights=True, device="cpu", total_blocks=4)
    backend = ModelBackend(resolve(config, Hardware(cuda_devices=0, free_memory_bytes=1 << 30)))
    (sample,) = execute(backend, Batch(0, [Row([5, 6, 7], 0, [1], Sampling())]))
    assert sample is not None and 0 <= sample.token_ids[0] < backend.vocabulary_size


def test_no_random_integer_is_one_that_quantizers_do_not_write() -> None:
    place = torch.empty(128, 64, dtype=torch.int8)
    fill_randomly([whole("experts.0.up_proj.weight", place)], torch.device("cpu"))
    nibbles = torch.cat([place & 15, (place >> 4) & 15]).unique()
    assert nibbles.tolist() == [nibble for nibble in range(16) if nibble != 8]
