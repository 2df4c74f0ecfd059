"""Triton's norms, rotation and writes to the pool against their definitions."""

import pytest
import torch

from kernels.act_quant import Quantized, dequantize, empty_quantized
from kernels.kv_copy import BLOCK_TOKENS
from kernels.kv_copy import reference as kv_copy_reference
from kernels.kv_copy import triton as kv_copy
from kernels.kv_write import reference as kv_write_reference
from kernels.kv_write import triton as kv_write
from kernels.norm import reference as norm_reference
from kernels.norm import triton as norm
from kernels.rope import frequencies, rotation_table
from kernels.rope import reference as rope_reference
from kernels.rope import triton as rope

QUERY, LATENT, ROPE = 384, 160, 24
# Without a GPU the kernels run in Triton's interpreter; see conftest.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Relative norms: float32 sums in another order, and some values on the border of two bfloat16 or e4m3 numbers.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-3, torch.float8_e4m3fn: 1e-2}
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def rotations(tokens: int) -> torch.Tensor:
    table = rotation_table(frequencies(ROPE, 10000.0).to(DEVICE), 2000)
    return table[torch.randint(2000, (tokens,), device=DEVICE)]


def near(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> bool:
    found, expected, tolerance = found.double(), expected.double(), TOLERANCE[dtype or expected.dtype]
    return found.shape == expected.shape and bool((found - expected).norm() <= tolerance * expected.norm())


def same_quantized(found: Quantized, expected: Quantized) -> bool:
    return near(found.scales, expected.scales, torch.bfloat16) and near(
        dequantize(found), dequantize(expected), torch.float8_e4m3fn
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 64), (1, 40), (5, 128), (33, 700)])
def test_two_inputs_are_normalized_side_by_side(rows: int, width: int, dtype: torch.dtype) -> None:
    first, second = random(rows, width, dtype=dtype) * 5, random(rows, width + 8, dtype=dtype)[:, :width]
    weights = random(width, dtype=dtype), random(width, dtype=dtype)
    expected = norm_reference.join_rms_norms(first, second, *weights, 1e-6)
    assert near(norm.join_rms_norms(first, second, *weights, 1e-6), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 128), (1, 128), (7, 640)])
def test_the_residual_is_added_before_the_norm_and_quantization(rows: int, width: int, dtype: torch.dtype) -> None:
    delta, residual, weight = (random(*shape, dtype=dtype) for shape in [(rows, width), (rows, width), (width,)])
    other, expected = residual.clone(), torch.empty_like(residual)
    expected_quantized = empty_quantized(rows, width, device=residual.device)
    norm_reference.add_rms_norm(delta, other, weight, 1e-6, expected, expected_quantized)
    for is_plain, quantizes in ((True, False), (False, True), (True, True)):
        total, plain = residual.clone(), torch.empty_like(residual) if is_plain else None
        quantized = empty_quantized(rows, width, device=residual.device) if quantizes else None
        norm.add_rms_norm(delta, total, weight, 1e-6, plain, quantized)
        assert near(total, other) and (plain is None or near(plain, expected))
        assert quantized is None or same_quantized(quantized, expected_quantized)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads"), [(0, 3), (1, 1), (5, 3), (9, 40)])
def test_parts_of_tensors_are_rotated(rows: int, heads: int, dtype: torch.dtype) -> None:
    source, target = random(rows, heads, ROPE + 10, dtype=dtype), random(rows, heads, ROPE + 20, dtype=dtype)
    expected, turns = target.clone(), rotations(rows)
    rope_reference.rotate(source[:, :, 10:], turns, expected[:, :, 4 : 4 + ROPE])
    rope.rotate(source[:, :, 10:], turns, target[:, :, 4 : 4 + ROPE])
    assert near(target, expected)
    rope_reference.rotate(source[:, :, 10:], turns, source[:, :, 10:])
    assert near(source[:, :, 10:], expected[:, :, 4 : 4 + ROPE])


@pytest.mark.parametrize("tokens", [0, 1, 30])
@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("quantize", [False, True])
def test_latents_and_keys_are_written_to_the_pool(tokens: int, compressed: bool, quantize: bool) -> None:
    # Parts of wider rows.
    projected = random(tokens, 128 + QUERY + LATENT + ROPE)[:, 128:]
    pool = random(2, BLOCK_TOKENS, LATENT + ROPE) * float("nan")
    if compressed:
        pool = pool.to(torch.float8_e4m3fn)
    weights = random(QUERY), random(LATENT)
    turns, slots = rotations(tokens), torch.randperm(2 * BLOCK_TOKENS, device=DEVICE)[:tokens]
    scale = 0.25 if compressed else 1.0
    other, other_pool = projected.clone(), pool.clone()
    if quantize:
        found = kv_write.norm_quantize_and_write(projected, *weights, 1e-6, turns, slots, pool, scale)
        expected = kv_write_reference.norm_quantize_and_write(other, *weights, 1e-6, turns, slots, other_pool, scale)
        assert same_quantized(found, expected)
    else:
        normalized = kv_write.norm_and_write(projected, *weights, 1e-6, turns, slots, pool, scale)
        assert near(
            normalized, kv_write_reference.norm_and_write(other, *weights, 1e-6, turns, slots, other_pool, scale)
        )
    assert near(projected, other)
    assert torch.equal(pool.float().isnan(), other_pool.float().isnan())
    assert near(pool.float().nan_to_num(), other_pool.float().nan_to_num(), pool.dtype)


def test_queries_without_a_norm_pass_through() -> None:
    projected, pool = random(3, QUERY + LATENT + ROPE), random(2, BLOCK_TOKENS, LATENT + ROPE)
    before = projected.clone()
    slots = torch.tensor([5, 100, 7], device=DEVICE)
    query = kv_write.norm_and_write(projected, None, random(LATENT), 1e-6, rotations(3), slots, pool, 1.0)
    assert torch.equal(query, before[:, :QUERY])


@pytest.mark.parametrize("tokens", [0, 1, 77])
@pytest.mark.parametrize("compressed", [False, True])
def test_latents_are_read_and_placed(tokens: int, compressed: bool) -> None:
    pool = random(3, BLOCK_TOKENS, LATENT)
    pool = pool.to(torch.float8_e4m3fn) if compressed else pool
    slots = torch.randperm(3 * BLOCK_TOKENS, device=DEVICE)[:tokens]
    scale = 0.3 if compressed else 1.0
    found = kv_copy.read_latents(pool, slots, torch.bfloat16, scale)
    assert near(found, kv_copy_reference.read_latents(pool, slots, torch.bfloat16, scale))
    stored = kv_copy.read_latents(pool, slots, pool.dtype, 1.0)
    assert torch.equal(bytes_of(stored), bytes_of(pool).flatten(0, 1)[slots])
    rounded = kv_copy.read_latents(pool, slots, torch.float8_e4m3fn, 1.0)
    assert torch.equal(rounded.float(), kv_copy_reference.read_latents(pool, slots, torch.float8_e4m3fn, 1.0).float())
    order, places = torch.randperm(tokens, device=DEVICE), torch.randperm(3 * BLOCK_TOKENS, device=DEVICE)[:tokens]
    expected = pool.clone()
    kv_copy_reference.place_latents(stored, order, expected, places)
    kv_copy.place_latents(stored, order, pool, places)
    assert torch.equal(bytes_of(pool), bytes_of(expected))


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


@pytest.mark.parametrize(("width", "powers"), [(128, False), (384, True)])
@pytest.mark.parametrize("tokens", [0, 1, 77])
@pytest.mark.parametrize("compressed", [False, True])
def test_latents_are_read_in_groups_of_e4m3(
    tokens: int, width: int, powers: bool, compressed: bool, poisoned: None
) -> None:
    pool = random(3, BLOCK_TOKENS, width + ROPE)
    pool = pool.to(torch.float8_e4m3fn) if compressed else pool
    slots = torch.randperm(3 * BLOCK_TOKENS, device=DEVICE)[:tokens]
    given = pool, slots, torch.bfloat16, 0.3 if compressed else 1.0, width, powers
    (found, rest), (expected, expected_rest) = kv_copy.read_quantized(*given), kv_copy_reference.read_quantized(*given)
    assert torch.equal(bytes_of(found.values), bytes_of(expected.values))
    assert torch.equal(found.scales, expected.scales) and torch.equal(rest, expected_rest)
