import math
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest
import torch

from kernels.index_keys import copy_in, copy_out, make_queries, pool_shape, read_keys, reference, write_keys
from kernels.index_keys import triton as ours
from kernels.kv_copy import BLOCK_TOKENS
from kernels.rope import frequencies, rotation_table

TOKENS, HEADS, WIDTH, PAIRS, BLOCKS = 70, 3, 32, 4, 4
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]


def empty_pool(dtype: torch.dtype, blocks: int = BLOCKS) -> torch.Tensor:
    """Poisoned: bytes of ones are NaN in every format."""
    shape, stored = pool_shape(WIDTH, dtype)
    size = blocks * math.prod(shape) * stored.itemsize
    return torch.full((size,), 255, dtype=torch.uint8).view(stored).view(blocks, *shape)


def rotations(tokens: int = TOKENS) -> torch.Tensor:
    return rotation_table(frequencies(2 * PAIRS, 100.0), tokens)


def rotated(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x: [tokens, width] float64, pair by pair."""
    out = x.clone()
    for token, row in enumerate(x):
        for pair in range(PAIRS):
            first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + PAIRS)
            angle = token * float(frequencies(2 * PAIRS, 100.0)[pair])
            turned = complex(row[first], row[second]) * complex(math.cos(angle), math.sin(angle))
            out[token, first], out[token, second] = turned.real, turned.imag
    return out


BACKENDS = [reference, ours]


@pytest.fixture(autouse=True)
def _tensors_lie_on_the_device(device: torch.device) -> Iterator[None]:
    with device:
        yield


@pytest.fixture(params=BACKENDS, ids=["definition", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What computes: on a CPU Triton's kernels are interpreted."""
    monkeypatch.setattr("kernels.index_keys._backend", lambda *_: request.param)
    return request.param


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.usefixtures("backend")
def test_keys_are_normalized_rotated_and_written_to_their_slots(dtype: torch.dtype, interleaved: bool) -> None:
    # Parts of wider rows.
    projected = (torch.randn(TOKENS, 2 * WIDTH) * 3 + 1)[:, WIDTH:]
    weight, bias = torch.randn(WIDTH), torch.randn(WIDTH)
    slots, pool = torch.randperm(BLOCKS * BLOCK_TOKENS)[:TOKENS], empty_pool(dtype)
    write_keys(projected, weight, bias, rotations(), slots, pool, interleaved=interleaved)
    x = projected.double()
    normal = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, correction=0) + 1e-6).sqrt() * weight + bias
    expected = rotated(normal, interleaved)
    if dtype == torch.float8_e4m3fn:
        expected = reference.spread(expected.float()).double()
    error = (read_keys(pool, slots).double() - expected).norm() / expected.norm()
    assert error < {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float8_e4m3fn: 4e-2}[dtype]
    others = torch.ones(BLOCKS * BLOCK_TOKENS, dtype=torch.bool).index_fill_(0, slots, False).nonzero().flatten()
    assert (copy_out(pool, others).view(torch.uint8) == 255).all()


def test_the_hadamard_matrix_leaves_products_as_they_are() -> None:
    x, y = torch.randn(2, 50, 128)
    assert torch.allclose(reference.spread(x) @ reference.spread(y).t(), x @ y.t(), atol=1e-4)
    one = torch.zeros(128).index_fill_(0, torch.tensor([5]), 1.0)
    assert torch.allclose(reference.spread(one).abs(), torch.full((128,), 128**-0.5))


def test_scales_are_the_least_powers_of_two_that_fit() -> None:
    x = torch.randn(200, WIDTH) * torch.logspace(-6, 6, 200).unsqueeze(1)
    values, scales = reference.quantize(x)
    assert torch.equal(torch.frexp(scales).mantissa, torch.full_like(scales, 0.5))
    largest = values.float().abs().amax(1)
    assert (largest <= 448).all() and (largest[x.abs().amax(1) > 1e-4] > 216).all()
    assert not reference.quantize(torch.zeros(1, WIDTH))[0].float().any()


@pytest.mark.usefixtures("backend")
def test_quantized_queries_have_their_scales_in_the_weights() -> None:
    projected, shares = torch.randn(TOKENS, HEADS, WIDTH), torch.randn(3, TOKENS, HEADS)
    weights = shares.sum(0) * 0.3
    plain, quantized = (
        make_queries(projected, shares, rotations(), empty_pool(dtype), factor=0.3, interleaved=False)
        for dtype in (torch.float32, torch.float8_e4m3fn)
    )
    assert torch.allclose(plain.weights, weights, atol=1e-6) and quantized.values.dtype == torch.float8_e4m3fn
    expected = reference.spread(plain.values) * weights.unsqueeze(2)
    found = quantized.values.float() * quantized.weights.unsqueeze(2)
    assert (found - expected).norm() / expected.norm() < 0.04


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_move_between_pools_bit_for_bit(dtype: torch.dtype) -> None:
    source, target = empty_pool(dtype), empty_pool(dtype)
    source.view(torch.uint8).random_(0, 255)
    taken, given = torch.randperm(BLOCKS * BLOCK_TOKENS)[:9], torch.randperm(BLOCKS * BLOCK_TOKENS)[:9]
    copied = copy_out(source, taken)
    copy_in(copied, target, given)
    assert torch.equal(copy_out(target, given), copied)
    assert (target.view(torch.uint8) != 255).sum() <= copied.numel()
    if dtype == torch.float8_e4m3fn:
        # Scales follow the keys of a block.
        block = source[1].flatten()
        assert torch.equal(copy_out(source, torch.tensor([64 + 3])), torch.cat((block[96:128], block[2060:2064]))[None])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_triton_rounds_as_the_definition_does(dtype: torch.dtype, interleaved: bool) -> None:
    projected, slots = torch.randn(TOKENS, WIDTH).bfloat16(), torch.randperm(BLOCKS * BLOCK_TOKENS)[:TOKENS]
    weight, bias, pools = torch.randn(WIDTH), torch.randn(WIDTH), [empty_pool(dtype) for _ in BACKENDS]
    for backend, pool in zip(BACKENDS, pools, strict=True):
        backend.write_keys(projected, weight, bias, 1e-6, rotations(), slots, pool, interleaved)
    queries, weights = torch.randn(TOKENS, HEADS, WIDTH).bfloat16(), torch.randn(3, TOKENS, HEADS)
    quantized = dtype == torch.float8_e4m3fn
    made = [each.make_queries(queries, weights, 0.3, rotations(), quantized, interleaved) for each in BACKENDS]
    error = 1e-5 if dtype == torch.float32 else 4e-3
    pairs = [[read_keys(pool, slots).float() for pool in pools], [each.values.float() for each in made]]
    for defined, found in pairs:
        assert (found - defined).norm() <= error * defined.norm()
    assert torch.allclose(made[0].weights, made[1].weights, atol=1e-5)


def test_warps_take_bf16_rows_for_quantized_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cuda.bindings")
    rows, turns = import_module("kernels.index_keys.rows"), torch.ones(2, 32, dtype=torch.complex64)
    monkeypatch.setattr(rows, "is_hopper", lambda _: True)
    projected = torch.zeros(2, 128, dtype=torch.bfloat16)
    assert rows.takes(projected, turns, True)
    assert not rows.takes(projected, turns, False) and not rows.takes(projected.float(), turns, True)
    assert not rows.takes(projected[:, :64], turns, True) and not rows.takes(projected, turns[:, :2], True)
    wide = torch.zeros(2, 130, dtype=torch.bfloat16)
    assert not rows.takes(wide[:, :128], turns, True)


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads", [64, 3])
@pytest.mark.parametrize("pairs", [32, 4, 64])
def test_warps_round_as_the_definition_does(pairs: int, heads: int, interleaved: bool) -> None:
    rows, turns = import_module("kernels.index_keys.rows"), rotation_table(frequencies(2 * pairs, 100.0), TOKENS)
    keys, queries = torch.randn(TOKENS, 704).bfloat16()[:, :128], torch.randn(TOKENS, heads, 128).bfloat16()
    weight, bias, weights = torch.randn(128), torch.randn(128), torch.randn(7, TOKENS, heads)
    slots = torch.randperm(BLOCKS * BLOCK_TOKENS)[:TOKENS]
    shape, stored = pool_shape(128, torch.float8_e4m3fn)
    pools = [torch.full((BLOCKS, *shape), 255, dtype=stored) for _ in range(2)]
    for backend, pool in zip((reference, rows), pools, strict=True):
        backend.write_keys(keys, weight, bias, 1e-6, turns, slots, pool, interleaved)
    made = [each.make_queries(queries, weights, 0.3, turns, True, interleaved) for each in (reference, rows)]
    found, defined = (read_keys(pool, slots) for pool in reversed(pools))
    assert (found - defined).norm() <= 4e-3 * defined.norm()
    others = torch.ones(BLOCKS * BLOCK_TOKENS, dtype=torch.bool).index_fill_(0, slots, False).nonzero().flatten()
    assert (copy_out(pools[1], others).view(torch.uint8) == 255).all()
    assert (made[1].values.float() - made[0].values.float()).norm() <= 4e-3 * made[0].values.float().norm()
    assert torch.allclose(made[1].weights, made[0].weights, atol=1e-5)
