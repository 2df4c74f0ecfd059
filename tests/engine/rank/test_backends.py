"""Backends of one process that take the weights of the one before."""

import json
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.rank.backends import Backends
from engine.runner.backend import ModelBackend
from mesh.errors import EngineFailed
from tests.support.checkpoints import tiny_checkpoint


def test_weights_of_a_replaced_checkpoint_are_not_taken(tmp_path: Path) -> None:
    checkpoint, backends = tiny_checkpoint(tmp_path), Backends()
    config = EngineConfig(model_dir=checkpoint, device="cpu", total_blocks=8)
    first, second = (backends.make(config) for _ in range(2))
    assert isinstance(first, ModelBackend) and isinstance(second, ModelBackend)
    assert second.weights is first.weights
    description = checkpoint / "config.json"
    description.write_text(json.dumps(json.loads(description.read_text()) | {"torch_dtype": "float64"}))
    with pytest.raises(EngineFailed, match="has another checkpoint now"):
        backends.make(config)
