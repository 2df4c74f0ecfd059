"""Experts in host memory on a GPU: captured and other steps give the tokens of experts that lie on the device."""

import gc
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.engine import Engine
from engine.offload.config import OffloadConfig
from engine.runner.backend import ModelBackend
from engine.settings.device import Hardware, resolve
from tests.support.checkpoints import random_prompt
from tests.support.engines import Transcript, assert_at_rest, submit_of
from tools.make_checkpoint import checkpoint_config
from tools.quantization_configs import FP8_CONFIG, W4A8_CONFIG

# A layer's experts take tens of MB. Copying them lasts longer than a layer of a small step, so that a missing wait for
# a copy would show.
WIDE = {
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 16,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
}
QUANTIZATION: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "FP8": dict(FP8_CONFIG),
    "INT4": dict(W4A8_CONFIG),
    "NVFP4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}
LENGTHS = (1, 30, 65, 129, 300)


def write_model(directory: Path, form: str) -> Path:
    config = checkpoint_config("tiny", dtype="bfloat16", overrides=dict(WIDE))
    if (quantization := QUANTIZATION[form]) is not None:
        config["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def served(directory: Path, offload: OffloadConfig, **settings: Any) -> tuple[dict[int, list[int]], int]:
    """Tokens, and the bytes of GPU memory that the engine had when it was ready."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    defaults = {"max_step_tokens": 512, "max_requests": 8, "total_blocks": 64, "warm_up": "off", "device": "cuda"}
    config = EngineConfig(model_dir=directory, random_weights=True, offload=offload, **{**defaults, **settings})
    backend = ModelBackend(resolve(config, Hardware(torch.cuda.device_count(), 1 << 30)))
    taken = torch.cuda.memory_allocated() - before
    engine = Engine(config, backend, time.monotonic)
    for key, length in enumerate(LENGTHS):
        engine.submit(submit_of(key, random_prompt(length, seed=length), 30, ignore_eos=True))
    tokens = Transcript().run(engine).token_ids
    assert_at_rest(engine)
    return tokens, taken


@pytest.mark.gpu
@pytest.mark.parametrize("form", QUANTIZATION)
def test_offloaded_experts_free_gpu_memory_and_change_no_token(tmp_path: Path, form: str) -> None:
    directory = write_model(tmp_path, form)
    expected, whole = served(directory, OffloadConfig())
    for layers, slots in ((3, 2), (7, 2), (4, 1)):
        found, rest = served(directory, OffloadConfig(layers=layers, slots=slots))
        assert found == expected
        # At least four bits for each weight of the three matrices of every expert in host memory. The rest may differ a
        # little.
        assert whole - rest > 0.9 * (layers - slots) * 64 * 3 * 512 * 512 / 2


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"decode_graphs": "off"}, {"overlap": "off"}])
def test_drafts_with_experts_in_host_memory_change_no_token(tmp_path: Path, settings: dict[str, Any]) -> None:
    directory = write_model(tmp_path, "plain")
    given = {"dtype": "float32", "drafts": DraftsConfig(next_n=2), **settings}
    expected, _ = served(directory, OffloadConfig(), **given)
    assert served(directory, OffloadConfig(layers=5), **given)[0] == expected


@pytest.mark.gpu
def test_auto_keeps_as_many_experts_on_the_device_as_fit(tmp_path: Path) -> None:
    directory = write_model(tmp_path, "plain")
    _, taken = served(directory, OffloadConfig(layers="auto", kv_tokens=64))
    assert taken > 7 * 64 * 3 * 512 * 512 * 2
