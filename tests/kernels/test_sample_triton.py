"""Triton's draws against the definition: the same tokens, unless rounding decides."""

import pytest
import torch

from kernels.sample import reference
from kernels.sample.draws import Draw, Draws, pack_draws
from tests.support.combinations import crossed

triton = pytest.importorskip("kernels.sample.triton")
ROWS, VOCABULARY = 8, 700


def both(logits: torch.Tensor, draws: list[Draw]) -> tuple[list[int], list[int]]:
    packed = Draws.unpack(pack_draws(draws, logits.device))
    expected = reference.draw(logits, packed, filtered=True)
    return triton.draw(logits, packed).tolist(), expected.tolist()


@crossed(
    temperature__top_k__top_p=[
        (1.0, 0, 1.0), (0.6, 0, 0.95), (1.3, 20, 1.0), (0.8, 50, 0.7), (2.0, 1, 0.5), (1e-40, 0, 0.9), (1.0, 9999, 0.3),
    ],
    dtype=[torch.float32, torch.bfloat16],
)  # fmt: skip
def test_tokens_are_the_definitions(
    device: torch.device, dtype: torch.dtype, temperature: float, top_k: int, top_p: float
) -> None:
    logits = (torch.randn(ROWS, VOCABULARY) * 3).to(device, dtype)
    seeds = torch.randint(1 << 62, (ROWS,)).tolist()
    draws = [Draw(temperature, top_k, top_p, seed, position=row * 1000) for row, seed in enumerate(seeds)]
    found, expected = both(logits, draws)
    assert sum(one == other for one, other in zip(found, expected, strict=True)) >= ROWS - 1


@crossed(
    min_p__top_k__top_p=[(0.05, 0, 1.0), (0.3, 20, 1.0), (0.02, 5, 0.8), (1.0, 0, 0.5)],
    dtype=[torch.float32, torch.bfloat16],
)
def test_min_p_is_the_definitions(
    device: torch.device, dtype: torch.dtype, min_p: float, top_k: int, top_p: float
) -> None:
    logits = (torch.randn(ROWS, VOCABULARY) * 3).to(device, dtype)
    seeds = torch.randint(1 << 62, (ROWS,)).tolist()
    found, expected = both(logits, [Draw(1.2, top_k, top_p, seed, 7, min_p) for seed in seeds])
    assert sum(one == other for one, other in zip(found, expected, strict=True)) >= ROWS - 1


def test_of_equal_logits_the_first_are_kept(device: torch.device) -> None:
    logits = torch.zeros(ROWS, VOCABULARY, device=device, dtype=torch.bfloat16)
    logits[:, 300:] = -1.0
    found, expected = both(logits, [Draw(1.0, 40, 0.5, seed, 1) for seed in range(ROWS)])
    assert found == expected and max(found) < 20


def test_excluded_tokens_are_never_drawn(device: torch.device) -> None:
    logits = torch.full((ROWS, VOCABULARY), float("-inf"), device=device)
    logits[:, [3, 600]] = torch.tensor([0.0, 0.5], device=device)
    found, expected = both(logits, [Draw(1.0, 0, 1.0, seed, 0) for seed in range(ROWS)])
    assert found == expected and set(found) == {3, 600}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "vocabulary"), [(0, 50), (3, 50), (2, triton.PART), (3, 2 * triton.PART + 1)])
def test_the_likeliest_token_is_the_definitions(
    device: torch.device, dtype: torch.dtype, rows: int, vocabulary: int
) -> None:
    logits = torch.randn(rows, vocabulary + 8, device=device).to(dtype)[:, :vocabulary]
    assert torch.equal(triton.greedy(logits), reference.greedy(logits))


def test_likeliest_tokens_are_stored_where_they_are_wanted(device: torch.device) -> None:
    logits, copy = torch.randn(3, 50, device=device), torch.full((2,), -1, device=device)
    on_host = torch.full((3,), -1, pin_memory=device.type == "cuda")
    address = torch.tensor([on_host.data_ptr()], device=device)
    found = triton.greedy(logits, copy, address).tolist()
    assert found == logits.argmax(1).tolist() == on_host.tolist()
    assert copy.tolist() == found[:2]


def test_the_first_of_equally_likely_tokens_is_taken(device: torch.device) -> None:
    vocabulary = 3 * triton.PART
    logits = torch.full((4, vocabulary), float("-inf"), device=device)
    logits[0, [triton.PART + 5, triton.PART + 6, 2 * triton.PART]] = -3.0
    logits[1, vocabulary - 1] = 1.0
    logits[3, 7] = float("nan")
    logits[3, 9] = 2.0
    assert triton.greedy(logits).tolist() == [triton.PART + 5, vocabulary - 1, 0, 9]
