"""Configurations drawn at random start on a GPU, or are refused before anything is loaded."""

import gc
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from capacity.shapes import EXPERTS, SHAPES
from engine.backend import execute
from engine.batch import Batch, Row
from engine.config import EngineConfig
from engine.model.config import read_model_config
from engine.runner.backend import ModelBackend
from engine.settings.card import find_cards
from engine.settings.device import Hardware, resolve
from engine.settings.fitting import check_fits
from mesh.domain.sampling import Sampling
from mesh.errors import ConfigError

pytestmark = pytest.mark.gpu

# What engines of earlier tests may have left of this process's share of the GPU: of 22.5 GB they once left 0.65.
LEFT_SHARE = 0.05


def drawn(seed: int, directory: Path) -> EngineConfig:
    """One of eight ranks of R1, cut in depth, with settings that leave little memory."""
    rng = random.Random(seed)
    shape = {**SHAPES["r1-ep8-rank"], "num_hidden_layers": rng.randint(4, 12), "num_nextn_predict_layers": 1}
    shape["quantization_config"] = EXPERTS[rng.choice(["fp8", "w4a8"])]
    (directory / "config.json").write_text(json.dumps(shape, default=dict))
    settings: dict[str, Any] = {
        "max_requests": rng.choice([1, 32, 96, 192]),
        "max_step_tokens": rng.choice([2048, 4096, 16384]),
        "kv_dtype": rng.choice(["auto", "float8_e4m3fn"]),
        "prompt_attention_dtype": rng.choice(["auto", "float8_e4m3fn"]),
        "drafts": {"next_n": rng.choice([0, 1, "auto"])},
        "transfer": rng.choice([None, {}]),
        "memory_share": rng.choice([0.15, 0.25, 1.0]),
    }
    fixed = {"model_dir": directory, "random_weights": True, "device": "cuda", "context_tokens": 32768}
    return EngineConfig.model_validate({**fixed, **settings})


@pytest.mark.parametrize("seed", range(20))
def test_a_drawn_configuration_starts_or_is_refused(seed: int, tmp_path: Path) -> None:
    config = drawn(seed, tmp_path)
    try:
        reckoned = check_fits(read_model_config(tmp_path), find_cards()[0], config)
    except ConfigError:
        return
    backend = None
    try:
        backend = ModelBackend(resolve(config, Hardware(torch.cuda.device_count(), 1 << 30)))
        wanted = min(reckoned.blocks, 512 * config.max_requests)
        missing = (wanted - backend.total_blocks) * reckoned.block
        assert missing < max(0.2 * wanted * reckoned.block, LEFT_SHARE * reckoned.there)
        blocks = list(range(32768 // 64 // 4))
        assert execute(backend, Batch(0, [Row([0] * 2000, 0, blocks, Sampling())]))[0] is not None
    finally:
        del backend
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0)
