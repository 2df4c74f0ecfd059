"""Keys and values from latents, with weights in FP8 and without."""

import dataclasses

import pytest
import torch

from engine.model.allocator import Allocator
from engine.model.config import ModelConfig, parse_model_config
from engine.model.expansion import Expansion, Fp8Expansion, PlainExpansion, make_expansion
from engine.model.formats.choice import choose_formats
from engine.model.quantization import Quantization, Stored
from engine.weights.random_weights import fill_randomly
from kernels.act_quant import Quantized, dequantize
from kernels.fp8_gemm import make_workspace
from kernels.kv_copy import BLOCK_TOKENS
from tests.support.oracle_model import relative_error
from tools.make_checkpoint import checkpoint_config

CPU = torch.device("cpu")
LATENT, ROPE, HEADS = 128, 16, 4
FP8 = Quantization(linear=Stored.FP8)
EVERY_ROW = slice(None)


def config() -> ModelConfig:
    widths = {"kv_lora_rank": LATENT, "qk_nope_head_dim": 32, "v_head_dim": 32}
    return parse_model_config(checkpoint_config("tiny", dtype="float8", overrides=widths))


def allocator(stored: Quantization = FP8, *, dequantize: bool = False) -> Allocator:
    return Allocator(torch.bfloat16, CPU, choose_formats(stored, torch.bfloat16, dequantize=dequantize))


def filled() -> Expansion:
    expansion = make_expansion(config(), HEADS, allocator())
    fill_randomly(expansion.parameters("kv_b_proj"), CPU)
    expansion.finish()
    return expansion


def test_fp8_weights_are_kept_in_both_forms() -> None:
    expansion = filled()
    assert isinstance(expansion, Fp8Expansion)
    names = {each.name: each.place for each in expansion.parameters("kv_b_proj")}
    scales = names["kv_b_proj.weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(expansion.weight, (names["kv_b_proj.weight"].float() * scales).bfloat16())
    assert expansion.derived_bytes == 2 * HEADS * 64 * LATENT


@pytest.mark.parametrize(
    ("heads", "allocate"),
    [(3, allocator()), (HEADS, allocator(Quantization())), (HEADS, allocator(dequantize=True))],
    ids=["a share that ends within a block", "a plain checkpoint", "dequantized weights"],
)
def test_all_else_is_expanded_in_the_models_dtype(heads: int, allocate: Allocator) -> None:
    assert isinstance(make_expansion(config(), heads, allocate), PlainExpansion)


def test_fp8_weights_are_not_cut_within_a_block() -> None:
    """Eight heads of 24 rows are a block and a half; sixteen are three blocks."""
    narrow = dataclasses.replace(config(), qk_nope_head_dim=16, v_head_dim=8)
    assert isinstance(make_expansion(narrow, 16, allocator()), PlainExpansion)


@pytest.mark.parametrize("keys", [0, 1, 130])
def test_computed_latents_are_rounded_once(keys: int) -> None:
    expansion, latents = filled(), torch.randn(keys, LATENT + ROPE).bfloat16()
    read = expansion.computed(latents)
    assert isinstance(read.compressed, Quantized) and torch.equal(read.shared, latents[:, LATENT:])
    found = expansion.forward(read, make_workspace(CPU), EVERY_ROW)
    expected = dequantize(read.compressed) @ expansion.weight.float().T
    assert found.shape == (keys, HEADS * 64)
    if keys:
        assert relative_error(found, expected) < 5e-3
        assert relative_error(found, latents[:, :LATENT].float() @ expansion.weight.float().T) < 0.05


@pytest.mark.parametrize("allocate", [allocator(), allocator(Quantization())], ids=["FP8", "bfloat16"])
def test_some_heads_are_expanded_as_among_all(allocate: Allocator) -> None:
    expansion = make_expansion(config(), HEADS, allocate)
    fill_randomly(expansion.parameters("kv_b_proj"), CPU)
    expansion.finish()
    latents, rows, workspace = torch.randn(130, LATENT + ROPE).bfloat16(), slice(128, 256), make_workspace(CPU)
    found = expansion.forward(expansion.computed(latents), workspace, rows)
    expected = expansion.forward(expansion.computed(latents), workspace, EVERY_ROW)[:, rows]
    assert expected.any() and relative_error(found, expected.float()) < 5e-3


@pytest.mark.parametrize("compressed", [False, True])
def test_latents_of_the_pool_are_those_that_it_holds(compressed: bool) -> None:
    expansion, scale = filled(), 0.25 if compressed else 1.0
    stored = torch.randn(3, BLOCK_TOKENS, LATENT + ROPE).to(torch.float8_e4m3fn if compressed else torch.bfloat16)
    slots = torch.randperm(3 * BLOCK_TOKENS)[:70]
    read, held = expansion.read(stored, slots, scale), stored.float().view(-1, LATENT + ROPE)[slots] * scale
    assert isinstance(read.compressed, Quantized) and torch.equal(read.shared.float(), held[:, LATENT:])
    error = relative_error(dequantize(read.compressed), held[:, :LATENT])
    assert error == 0 if compressed else 0 < error < 0.04
