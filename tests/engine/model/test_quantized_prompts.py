"""Prompts whose attention multiplies in e4m3, in float32 on a small checkpoint, and in steps with exact ones."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.batch import Row
from engine.model.inputs import build_context
from engine.runner.backend import ModelBackend
from mesh.blocks import BLOCK_TOKENS
from tests.support.checkpoints import GREEDY, generate, model_backend, random_prompt, tiny_checkpoint
from tests.support.family import FAMILY

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


@pytest.fixture(scope="module")
def indexed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("indexed"), **FAMILY["deepseek-v3.2"])


# Chunks, and scores of a part of a chunk's queries: of all and of 20 at 700 tokens.
@pytest.mark.parametrize(("chunk", "scores"), [(1 << 20, 1 << 20), (250, 14000)])
def test_queries_that_select_attend_to_rounded_latents(
    indexed: Path, chunk: int, scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A mask's products are not in e4m3.
    monkeypatch.setattr("engine.model.state.masked_until", lambda *_: 0)
    monkeypatch.setattr("engine.model.indexed_rows.MOST_SCORES", scores)
    exact = kv_of(model_backend(indexed), chunk)
    backend = model_backend(indexed, prompt_attention_dtype="float8_e4m3fn")
    # Those before the first that selects do so as in any model.
    monkeypatch.setattr("engine.model.prompt_forms.ROUNDED_FOR_A_QUERY", 0)
    unrounded = kv_of(backend, chunk)
    monkeypatch.setattr("engine.model.prompt_forms.ROUNDED_FOR_A_QUERY", 700)
    rounded = kv_of(backend, chunk)
    assert 1e-4 < difference(unrounded[1:], exact[1:]) < difference(rounded[1:], exact[1:]) < 0.15
    stored = model_backend(indexed, prompt_attention_dtype="float8_e4m3fn", kv_dtype="float8_e4m3fn")
    assert difference(rounded[1:], kv_of(stored, chunk)[1:].float()) < 0.05


def test_latents_are_rounded_for_many_queries(indexed: Path) -> None:
    def rounds(tokens: int, **settings: Any) -> list[bool]:
        backend = model_backend(indexed, **settings)
        row = Row(PROMPT[-tokens:], len(PROMPT) - tokens, list(range(len(PROMPT) // BLOCK_TOKENS + 1)), GREEDY)
        context = build_context(backend.weights.config, [row], backend.state)
        return [each.rounded is not None for each in context.indexed]

    fp8 = "float8_e4m3fn"
    assert rounds(3, prompt_attention_dtype=fp8) == [True] and rounds(2, prompt_attention_dtype=fp8) == [False]
    assert rounds(3) == rounds(3, prompt_attention_dtype=fp8, kv_dtype=fp8) == [False]
