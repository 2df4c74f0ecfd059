"""Prompts whose attention multiplies in e4m3, in float32 on a small checkpoint, and in steps with exact ones."""

from pathlib import Path

import pytest
import torch

from engine.runner.backend import ModelBackend
from mesh.blocks import BLOCK_TOKENS
from tests.support.checkpoints import generate, model_backend, random_prompt, tiny_checkpoint

PROMPT = random_prompt(700, seed=3)
BLOCKS = range(len(PROMPT) // BLOCK_TOKENS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def exact(checkpoint: Path) -> torch.Tensor:
    return kv_of(model_backend(checkpoint))


@pytest.fixture(scope="module")
def backend(checkpoint: Path) -> ModelBackend:
    return model_backend(checkpoint, prompt_attention_dtype="float8_e4m3fn")


def kv_of(backend: ModelBackend, chunk: int = 1 << 20) -> torch.Tensor:
    """[layers, blocks, 64, latent] of the prompt, computed in chunks."""
    generate(backend, PROMPT, 1, range(-(-len(PROMPT) // BLOCK_TOKENS)), chunk=chunk)
    return backend.state.kv_pool[:, BLOCKS].clone()


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("chunk", [1 << 20, 250, 300])
def test_kv_of_a_prompt_is_near_the_exact_one(backend: ModelBackend, exact: torch.Tensor, chunk: int) -> None:
    found = kv_of(backend, chunk)
    # What the first layer writes depends on no attention.
    assert torch.allclose(found[0], exact[0], atol=1e-5)
    assert 1e-4 < difference(found[1:], exact[1:]) < 0.15


def test_a_long_prompt_is_attended_to_head_by_head(
    backend: ModelBackend, exact: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.model.prompt_forms.EXPANDED_TOKENS", 192)
    monkeypatch.setattr("engine.model.expanded_attention.HEADS_TOGETHER", 1)
    assert 1e-4 < difference(kv_of(backend, 250)[1:], exact[1:]) < 0.15
