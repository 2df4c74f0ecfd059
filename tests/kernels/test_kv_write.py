import pytest
import torch

from kernels.act_quant import dequantize
from kernels.kv_copy import BLOCK_TOKENS, read_latents
from kernels.kv_write import norm_and_write, norm_quantize_and_write
from kernels.norm.reference import rms_norm
from kernels.rope import frequencies, rotate_, rotation_table

QUERY, LATENT, ROPE = 128, 32, 8
WIDTH = LATENT + ROPE


class Step:
    """Random tokens on their way into a poisoned pool of three blocks."""

    def __init__(self, tokens: int, dtype: torch.dtype = torch.float32) -> None:
        # Parts of wider rows.
        self.projected = torch.randn(tokens, 64 + QUERY + WIDTH)[:, 64:]
        weight, self.latent_weight = torch.randn(QUERY), torch.randn(LATENT)
        # None if queries have no norm.
        self.query_weight: torch.Tensor | None = weight
        self.rotations = rotation_table(frequencies(ROPE, 10000.0), 100)[torch.randperm(100)[:tokens]]
        self.slots = torch.randperm(3 * BLOCK_TOKENS)[:tokens]
        self.pool = torch.full((3, BLOCK_TOKENS, WIDTH), float("nan")).to(dtype)
        latents = self.projected[:, QUERY:].clone()
        latents[:, :LATENT] = rms_norm(latents[:, :LATENT].contiguous(), self.latent_weight, 1e-6)
        rotate_(latents[:, None, LATENT:], self.rotations)
        self.expected_latents = latents
        self.expected_query = rms_norm(self.projected[:, :QUERY].contiguous(), weight, 1e-6)

    def write(self, scale: float = 1.0) -> torch.Tensor:
        return norm_and_write(
            self.projected, self.query_weight, self.latent_weight, 1e-6, self.rotations, self.slots, self.pool, scale
        )


@pytest.mark.parametrize("tokens", [0, 1, 50])
def test_latents_are_normalized_rotated_and_stored_at_their_slots_only(tokens: int) -> None:
    step = Step(tokens)
    query = step.write()
    assert torch.allclose(query, step.expected_query, atol=1e-6)
    assert torch.allclose(read_latents(step.pool, step.slots, torch.float32), step.expected_latents, atol=1e-6)
    assert torch.allclose(step.projected[:, QUERY:], step.expected_latents, atol=1e-6)
    assert step.pool.isnan().sum() == (3 * BLOCK_TOKENS - tokens) * WIDTH


def test_queries_without_a_norm_pass_through() -> None:
    step = Step(3)
    step.query_weight = None
    before = step.projected[:, :QUERY].clone()
    assert torch.equal(step.write(), before)


def test_queries_are_quantized_in_groups() -> None:
    step = Step(20)
    assert step.query_weight is not None
    found = norm_quantize_and_write(
        step.projected, step.query_weight, step.latent_weight, 1e-6, step.rotations, step.slots, step.pool
    )
    error = (dequantize(found) - step.expected_query).abs()
    assert (error <= step.expected_query.abs().amax(1, keepdim=True) * 2**-4).all()
    assert torch.allclose(read_latents(step.pool, step.slots, torch.float32), step.expected_latents, atol=1e-6)


def test_a_compressed_pool_keeps_three_bits_of_mantissa() -> None:
    step = Step(50, torch.float8_e4m3fn)
    step.latent_weight[3] = 1e6
    step.expected_latents[:, 3] *= 0
    step.write(scale=0.5)
    found = read_latents(step.pool, step.slots, torch.float32, 0.5)
    assert (found[:, 3].abs() == 448.0 * 0.5).float().mean() > 0.9, "clamped, not infinite"
    found[:, 3] = 0
    error = (found - step.expected_latents).abs()
    # Half of the last of three bits, or half of the smallest step.
    assert (error <= step.expected_latents.abs().mul(2**-4).clamp(min=2**-10)).all()
