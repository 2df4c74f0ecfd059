"""Penalties, biases and min_p against transformers' processors and OpenAI's formula."""

from collections import Counter
from collections.abc import Sequence
from typing import cast

import pytest
import torch
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor

from kernels.sample import Draw, Penalty, add_bias, count_drawn, count_tokens, draw, penalize
from kernels.sample import reference as definition
from kernels.sample.penalties import Penalties
from tests.support.errors import assert_close

VOCABULARY = 700
PROMPTS = [[3, 4, 3, 699], [], [5] * 20]
GENERATED = [[4, 4, 9], [1, 2, 1], []]


def counts_of(slots: Sequence[int] = (0, 1, 2)) -> torch.Tensor:
    counts = torch.full((4, VOCABULARY), 77, dtype=torch.int32)
    for slot, prompt, generated in zip(slots, PROMPTS, GENERATED, strict=True):
        count_tokens(counts[slot], prompt, generated)
    return counts


def test_the_repetition_penalty_is_that_of_transformers() -> None:
    logits = torch.randn(3, VOCABULARY) * 3
    expected = torch.cat(
        [
            RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[*prompt, *generated]]), row.unsqueeze(0).clone())
            for prompt, generated, row in zip(PROMPTS, GENERATED, logits, strict=True)
        ]
    )
    penalize(logits, counts_of(), [Penalty(slot, 1.7, 0.0, 0.0) for slot in range(3)])
    assert_close(logits, expected)


def test_presence_and_frequency_count_what_was_generated_alone() -> None:
    logits = torch.randn(3, VOCABULARY)
    expected = logits.clone()
    for row, generated in enumerate(GENERATED):
        for token_id, times in Counter(generated).items():
            expected[row, token_id] -= 0.5 + 0.25 * times
    # Slots in another order than the rows.
    penalize(logits, counts_of((2, 0, 1)), [Penalty(slot, 1.0, 0.5, 0.25) for slot in (2, 0, 1)])
    assert_close(logits, expected)


def test_a_drawn_token_counts_as_a_generated_one() -> None:
    counts = counts_of()
    count_drawn(counts, torch.tensor([2, 0]), torch.tensor([[5, -1, -1], [4, 6, 4]]))
    expected = torch.empty(2, VOCABULARY, dtype=torch.int32)
    count_tokens(expected[0], PROMPTS[0], [*GENERATED[0], 4, 6, 4])
    count_tokens(expected[1], PROMPTS[2], [5])
    assert torch.equal(counts[[0, 2]], expected)


def test_a_bias_is_added_to_its_token_alone() -> None:
    logits = torch.zeros(2, VOCABULARY)
    add_bias(logits, [(0, 5, -100.0), (1, 5, 2.5), (1, 699, 1.0)])
    assert logits.nonzero().tolist() == [[0, 5], [1, 5], [1, 699]]
    assert logits[[0, 1, 1], [5, 5, 699]].tolist() == [-100.0, 2.5, 1.0]


@pytest.mark.parametrize("min_p", [0.02, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_min_p_keeps_what_transformers_keeps(min_p: float, temperature: float) -> None:
    logits = torch.randn(1, 40) * 2
    kept = (
        MinPLogitsWarper(min_p)(cast(torch.LongTensor, torch.tensor([[0]])), logits / temperature)
        .isfinite()
        .nonzero()[:, 1]
        .tolist()
    )
    draws = [Draw(temperature, 0, 1.0, seed=3, position=position, min_p=min_p) for position in range(3000)]
    found = set(draw(logits.expand(3000, -1), draws).tolist())
    assert found <= set(kept) and int(logits.argmax()) in found
    assert len(found) > len(kept) / 2


def test_no_rows_are_penalized_and_no_biases_added() -> None:
    penalize(torch.empty(0, VOCABULARY), counts_of(), [])
    add_bias(torch.empty(0, VOCABULARY), [])


def test_the_kernel_does_what_the_definition_does(device: torch.device) -> None:
    triton = pytest.importorskip("kernels.sample.triton")
    logits = (torch.randn(3, 5000) * 3).to(device)
    counts = torch.zeros(4, 5000, dtype=torch.int32, device=device)
    for slot in range(4):
        ids = torch.randint(5000, (2, 3000)).tolist()
        count_tokens(counts[slot], ids[0], ids[1])
    penalties = [Penalty(3, 1.3, 0.5, 0.25), Penalty(0, 0.7, -1.0, 0.0), Penalty(2, 1.0, 0.0, 2.0)]
    packed = Penalties.pack(penalties, device)
    expected = logits.clone()
    definition.penalize(expected, counts, packed)
    triton.penalize(logits, counts, packed)
    assert_close(logits, expected)
