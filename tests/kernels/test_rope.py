import cmath

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kernels.rope import frequencies, rotate_, rotation_table, yarn_frequencies

YARN = {"factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}


def rotated(x: torch.Tensor, positions: list[int]) -> torch.Tensor:
    x = x.clone()
    rotate_(x, rotation_table(frequencies(x.shape[2], 10000.0), 1000)[positions])
    return x


def test_pairs_turn_by_position_times_frequency() -> None:
    x = torch.randn(1, 1, 4)
    first, second = complex(*x[0, 0, :2].tolist()), complex(*x[0, 0, 2:].tolist())
    turned = [first * cmath.exp(7j), second * cmath.exp(7j * 10000**-0.5)]
    expected = torch.tensor([part for value in turned for part in (value.real, value.imag)])
    assert torch.allclose(rotated(x, [7])[0, 0], expected, atol=1e-6)


def test_scores_depend_on_the_distance_only() -> None:
    query, key = torch.randn(1, 3, 16), torch.randn(1, 3, 16)
    near = (rotated(query, [15]) * rotated(key, [3])).sum(2)
    far = (rotated(query, [515]) * rotated(key, [503])).sum(2)
    assert torch.allclose(near, far, atol=1e-4)


def test_a_part_of_a_wider_tensor_is_rotated_in_place() -> None:
    whole = torch.randn(4, 2, 24)
    before = whole.clone()
    rotate_(whole[:, :, 8:], rotation_table(frequencies(16, 10000.0), 9)[[1, 2, 4, 8]])
    assert torch.equal(whole[:, :, :8], before[:, :, :8])
    assert torch.equal(whole[:, :, 8:], rotated(before[:, :, 8:].contiguous(), [1, 2, 4, 8]))


def test_bfloat16_is_rotated_in_float32() -> None:
    x = torch.randn(5, 2, 16).bfloat16()
    assert torch.equal(rotated(x, [1, 2, 3, 4, 900]), rotated(x.float(), [1, 2, 3, 4, 900]).bfloat16())


def test_no_rows_are_no_work() -> None:
    assert rotated(torch.empty(0, 2, 16), []).shape == (0, 2, 16)


@pytest.mark.parametrize("truncate", [True, False], ids=["whole pairs", "not truncated"])
@pytest.mark.parametrize("dim", [16, 64])
def test_yarn_frequencies_are_those_of_transformers(dim: int, truncate: bool) -> None:
    parameters = {**YARN, "rope_type": "yarn", "rope_theta": 10000.0, "truncate": truncate}
    config = DeepseekV3Config(qk_rope_head_dim=dim, max_position_embeddings=163840, rope_parameters=parameters)
    expected, _ = ROPE_INIT_FUNCTIONS["yarn"](config, torch.device("cpu"))
    found = yarn_frequencies(
        dim, 10000.0, factor=40.0, original_positions=4096, beta_fast=32, beta_slow=1, truncate=truncate
    )
    assert torch.allclose(found, expected, rtol=1e-6)


def test_yarn_keeps_fast_pairs_and_slows_slow_ones() -> None:
    plain = frequencies(64, 10000.0)
    yarn = yarn_frequencies(64, 10000.0, factor=40.0, original_positions=4096, beta_fast=32, beta_slow=1)
    assert yarn[0] == plain[0] and yarn[-1] == pytest.approx(float(plain[-1]) / 40)


def test_the_table_is_scaled() -> None:
    table = rotation_table(frequencies(8, 10000.0), 5, scale=1.5)
    assert table.shape == (5, 4) and torch.allclose(table.abs(), torch.full((5, 4), 1.5))
