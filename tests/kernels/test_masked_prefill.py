"""Attention of a prompt to the keys that each query has chosen."""

import pytest
import torch

from kernels import mla_prefill as mla_prefill_package
from kernels.act_quant import dequantize, empty_quantized
from kernels.mla_prefill import (
    attend_and_quantize,
    causal_mask,
    empty_mask,
    mla_prefill,
    plan_prefill,
    takes_masks,
    write_mask,
)
from kernels.mla_prefill.mask import seen_keys
from kernels.top_tokens import NO_TOKEN
from tests.support.chosen_keys import choose_keys
from tests.support.errors import relative_error
from tests.support.hopper import on_hopper

SCALE = 0.1
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Case:
    """Random queries of a prompt, its keys and values, and the keys that queries have chosen."""

    def __init__(
        self, queries: int, keys: int, count: int, heads: int, device: torch.device, own: int = 128, value: int = 128
    ) -> None:
        """own, value: widths of a head's own part of the keys and of its values."""
        self.plan = plan_prefill([queries], [keys], device)
        self.query = torch.randn(queries, heads, own + 64, device=device).bfloat16()
        parts = torch.randn(keys, heads, own + value, device=device).bfloat16()
        self.own, self.value = parts.split([own, value], dim=2)
        self.shared = torch.randn(keys, 576, device=device).bfloat16()[:, 512:]
        self.tokens = choose_keys(queries, keys, count, device)
        # Its last rows stay as they are.
        self.mask = empty_mask(queries, keys, device).fill_(-1)
        for first in range(0, queries, 100):
            some = self.tokens[first : first + 100]
            write_mask(some, self.mask[:, first : first + len(some)])

    @property
    def inputs(self) -> Inputs:
        return self.query, self.own, self.shared, self.value

    def attend(self, *, masked: bool = True) -> torch.Tensor:
        out = self.query.new_empty(*self.query.shape[:2], self.value.shape[2])
        mla_prefill(*self.inputs, self.plan, out, scale=SCALE, mask=self.mask if masked else None)
        return out

    def expected(self) -> torch.Tensor:
        """Computed for each query in turn, over its own keys only."""
        key = torch.cat([self.own, self.shared.unsqueeze(1).expand(-1, self.own.shape[1], -1)], dim=2).float()
        found = []
        for query, tokens in zip(self.query.float(), self.tokens, strict=True):
            chosen = tokens[tokens != NO_TOKEN].long()
            weights = (torch.einsum("hd,khd->hk", query, key[chosen]) * SCALE).softmax(1)
            found.append(torch.einsum("hk,khd->hd", weights, self.value[chosen].float()))
        return torch.stack(found)


SHAPES = pytest.mark.parametrize(
    ("queries", "keys", "count"),
    [(1, 1, 1), (1, 300, 40), (70, 70, 64), (129, 260, 100), (300, 700, 256), (200, 200, 500)],
)


@SHAPES
def test_masks_have_the_bits_of_chosen_keys(queries: int, keys: int, count: int, device: torch.device) -> None:
    case = Case(queries, keys, count, 1, device)
    expected = torch.zeros(queries, keys, dtype=torch.bool, device=device)
    for row, tokens in zip(expected, case.tokens, strict=True):
        row[tokens[tokens != NO_TOKEN].long()] = True
    assert torch.equal(seen_keys(case.mask, queries, keys), expected)
    assert (case.mask[:, queries:] == -1).all()


@pytest.mark.usefixtures("poisoned")
@SHAPES
def test_queries_attend_to_their_chosen_keys(queries: int, keys: int, count: int, device: torch.device) -> None:
    case = Case(queries, keys, count, 3, device)
    expected = case.expected()
    assert relative_error(case.attend(), expected) < 0.01
    quantized = empty_quantized(queries, 3 * 128, device=device, powers=True)
    rows = quantized.rows(0, queries)
    attend_and_quantize(*case.inputs, case.plan, rows, scale=SCALE, mask=case.mask)
    assert relative_error(dequantize(quantized).view_as(expected), expected) < 0.06


@pytest.mark.parametrize("keys", [150, 400])
def test_a_mask_of_all_keys_changes_nothing(keys: int, device: torch.device) -> None:
    case = Case(150, keys, 40, 4, device)
    case.mask = causal_mask(150, keys, device)
    assert relative_error(case.attend(), case.attend(masked=False)) < 2e-3


def test_gpus_take_masks_where_our_kernel_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_prefill_package, "is_hopper", lambda _: True)
    hopper = torch.device("cuda")
    assert takes_masks(128, 64, 128, torch.bfloat16, hopper)
    assert takes_masks(192, 64, 256, torch.bfloat16, hopper)
    assert not takes_masks(128, 64, 192, torch.bfloat16, hopper)
    assert not takes_masks(128, 64, 128, torch.float32, hopper)
    monkeypatch.setattr(mla_prefill_package, "is_hopper", lambda _: False)
    assert not takes_masks(128, 64, 128, torch.bfloat16, hopper)


@on_hopper
@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("queries", "keys"), [(1452, 3500), (3500, 7000), (127, 6900)])
@pytest.mark.parametrize(("heads", "widths"), [(128, (128, 128)), (64, (192, 256))], ids=["deepseek", "glm"])
def test_2048_of_a_long_prompts_keys_are_attended_to(
    queries: int, keys: int, heads: int, widths: tuple[int, int], device: torch.device
) -> None:
    case = Case(queries, keys, 2048, heads, device, *widths)
    some = slice(5, 12)
    found, case.query, case.own, case.value = (
        case.attend()[:, some], case.query[:, some], case.own[:, some], case.value[:, some]
    )  # fmt: skip
    assert relative_error(found, case.expected()) < 0.01


@on_hopper
@pytest.mark.gpu
def test_captured_masked_attention_repeats_bit_by_bit(device: torch.device) -> None:
    case = Case(700, 2500, 600, 16, device)
    expected = case.attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_mask(case.tokens, case.mask[:, :700])
        found = case.attend()
    for _ in range(5):
        found.fill_(float("nan"))
        case.mask.fill_(0)
        graph.replay()
        assert torch.equal(found, expected)
