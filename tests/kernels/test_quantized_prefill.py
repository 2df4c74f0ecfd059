"""Attention over prompts in FP8: its definition, on a CPU."""

import pytest
import torch

from kernels.mla_prefill import mla_prefill, plan_prefill
from kernels.mla_prefill.fp8_reference import round_blocks, round_queries
from kernels.mla_prefill.tiles import BLOCK_KEYS

CPU = torch.device("cpu")
HEADS, OWN, ROPE, VALUE = 3, 32, 16, 24
SCALE = (OWN + ROPE) ** -0.5

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def prompt(queries: int, keys: int) -> Parts:
    """Queries, each head's own part of the keys, the part that all share, and values."""
    own, value = torch.randn(keys, HEADS, OWN + VALUE).split([OWN, VALUE], dim=2)
    return torch.randn(queries, HEADS, OWN + ROPE), own, torch.randn(keys, ROPE), value


def attend(parts: Parts, queries: list[int], keys: list[int], scale: float = SCALE) -> torch.Tensor:
    return attended(parts, queries, keys, scale, quantized=True)


def exact(parts: Parts, queries: list[int], keys: list[int]) -> torch.Tensor:
    return attended(parts, queries, keys, SCALE, quantized=False)


def attended(parts: Parts, queries: list[int], keys: list[int], scale: float, *, quantized: bool) -> torch.Tensor:
    query, _, _, value = parts
    out = query.new_empty(*query.shape[:2], value.shape[2])
    mla_prefill(*parts, plan_prefill(queries, keys, CPU, quantized=quantized), out, scale=scale)
    return out


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("queries", "keys"), [([1], [1]), ([300], [300]), ([5, 129, 1], [70, 129, 200])])
def test_outputs_are_within_a_twentieth_of_exact_ones(queries: list[int], keys: list[int]) -> None:
    parts = prompt(sum(queries), sum(keys))
    # Three bits of a mantissa: 2 to 3% of each of keys, values and weights, and independent.
    assert difference(attend(parts, queries, keys), exact(parts, queries, keys)) < 0.06


def test_what_e4m3_holds_is_attended_to_exactly() -> None:
    query, own, shared, value = prompt(200, 200)
    # Each block's largest magnitude is 448, so that scales are 1; and one key counts, whose weight is a power of two.
    query, own, shared = (torch.zeros_like(part) for part in (query, own, shared))
    own[:, :, 0] = 448
    query[:, :, 0] = 448
    own[7, :, 1] = 448
    query[:, :, 1] = 448
    value = value.to(torch.float8_e4m3fn).float()
    value[:, :, 0] = 448
    found = attend((query, own, shared, value), [200], [200], 0.01)
    assert torch.allclose(found[7:], value[7].expand_as(found[7:]))


def test_each_block_of_keys_has_its_own_scale() -> None:
    keys = 2 * BLOCK_KEYS + 44
    part = torch.randn(keys, 2, 16) * torch.tensor([1.0, 1e4, 1e-4]).repeat_interleave(BLOCK_KEYS)[:keys, None, None]
    rounded, scales = round_blocks(part)
    assert difference(rounded * scales, part) < 0.04
    for begin in range(0, keys, BLOCK_KEYS):
        end = min(begin + BLOCK_KEYS, keys)
        assert torch.equal(scales[begin:end, :, 0], scales[begin, :, 0].expand(end - begin, -1))
        assert rounded[begin:end].abs().amax(dim=(0, 2)).tolist() == [448, 448]
        assert difference((rounded * scales)[begin:end], part[begin:end]) < 0.04


def test_each_query_has_its_own_scale() -> None:
    query = torch.randn(9, 4, 16) * torch.logspace(-6, 6, 9)[:, None, None]
    assert torch.stack([(round_queries(query) - query).norm(dim=2) / query.norm(dim=2)]).max() < 0.06


def test_values_of_other_magnitudes_count_as_they_are() -> None:
    keys = 4 * BLOCK_KEYS
    query, own, shared, value = prompt(keys, keys)
    value *= torch.tensor([1.0, 0.03, 30.0, 1.0]).repeat_interleave(BLOCK_KEYS)[:, None, None]
    parts = query, own, shared, value
    assert difference(attend(parts, [keys], [keys]), exact(parts, [keys], [keys])) < 0.08


def test_keys_whose_values_are_zero_take_their_share() -> None:
    query, own, shared, value = prompt(400, 400)
    value[:BLOCK_KEYS] = 0
    parts = query, own, shared, value
    assert difference(attend(parts, [400], [400]), exact(parts, [400], [400])) < 0.08


def test_prompts_of_one_step_do_not_see_each_other() -> None:
    lengths = [(5, 5), (1, 90), (70, 175)]
    prompts = [prompt(queries, keys) for queries, keys in lengths]
    query, own, shared, value = (torch.cat(parts) for parts in zip(*prompts, strict=True))
    found = attend((query, own, shared, value), [5, 1, 70], [5, 90, 175])
    alone = [attend(parts, [queries], [keys]) for parts, (queries, keys) in zip(prompts, lengths, strict=True)]
    assert torch.equal(found, torch.cat(alone))


def test_no_prompts_give_nothing() -> None:
    assert attend(prompt(0, 0), [], []).shape == (0, HEADS, VALUE)
