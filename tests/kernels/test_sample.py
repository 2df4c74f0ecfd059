from collections import Counter
from typing import Any

import pytest
import torch

from kernels.sample import Draw, draw, greedy, is_candidate, logprobs
from kernels.sample.philox import philox, uniform

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, float("-inf")])


def drawn(count: int = 2000, **changes: float) -> Counter[int]:
    settings: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "seed": 3, **changes}
    draws = [Draw(**settings, position=position) for position in range(count)]
    return Counter(draw(LOGITS.expand(count, -1), draws).tolist())


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_repeats_its_published_vectors(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    a, b, c, d, e, f = (torch.tensor([word]) for word in (*counter, *key))
    assert tuple(int(word) for word in philox((a, b, c, d), (e, f))) == expected


def test_uniform_numbers_differ_by_seed_and_position() -> None:
    seeds, positions = torch.meshgrid(torch.tensor([0, 1, 1 << 40, -1]), torch.arange(500), indexing="ij")
    numbers = set(uniform(seeds, positions).flatten().tolist())
    assert len(numbers) == 2000 and 0 < min(numbers) < 0.01 and 0.99 < max(numbers) < 1


def test_greedy_takes_the_most_likely_token() -> None:
    assert greedy(torch.stack([LOGITS, -LOGITS.nan_to_num(neginf=9.0)])).tolist() == [0, 3]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_they_are_likely(temperature: float) -> None:
    counts, expected = drawn(temperature=temperature), (LOGITS / temperature).softmax(0)
    for token_id, probability in enumerate(expected.tolist()):
        assert abs(counts[token_id] / 2000 - probability) < 4 * (probability * (1 - probability) / 2000) ** 0.5 + 1e-9


def test_top_k_keeps_the_most_likely() -> None:
    assert drawn(top_k=2).keys() == {0, 4}
    assert drawn(top_k=1).keys() == {0}


def test_top_p_keeps_the_token_that_crosses_the_line() -> None:
    first, second = LOGITS.softmax(0).sort(descending=True).values[:2].tolist()
    assert drawn(top_p=first - 0.01).keys() == {0}
    assert drawn(top_p=first + 0.01).keys() == {0, 4}
    assert drawn(top_p=first + second + 0.01).keys() == {0, 4, 1}


def test_top_p_counts_within_what_top_k_left() -> None:
    # The first of the two kept tokens holds 62% of them, which is enough for 60%, though it holds only 43% of all.
    assert drawn(top_k=2, top_p=0.6).keys() == {0}


def test_the_coldest_temperature_is_greedy() -> None:
    assert drawn(count=50, temperature=1e-40).keys() == {0}


def test_a_token_does_not_depend_on_other_rows() -> None:
    logits = torch.randn(7, 50)
    draws = [Draw(1.0, 0, 0.9, seed=5, position=position) for position in (3, 9, 4, 4, 1000, 0)]
    draws.append(Draw(1.0, 0, 1.0, seed=5, position=7))
    alone = [int(draw(logits[index : index + 1], [item])) for index, item in enumerate(draws)]
    assert draw(logits, draws).tolist() == alone


def test_logprobs_are_of_temperature_one_and_best_first() -> None:
    chosen, token_ids, values = logprobs(LOGITS.expand(2, -1), torch.tensor([3, 0]), 3)
    expected = LOGITS.log_softmax(0)
    assert token_ids.tolist() == [[0, 4, 1]] * 2
    assert chosen.tolist() == pytest.approx(expected[[3, 0]].tolist())
    assert values[1].tolist() == pytest.approx(expected[[0, 4, 1]].tolist())


def test_no_alternatives_may_be_asked() -> None:
    assert [found.shape for found in logprobs(LOGITS.unsqueeze(0), torch.tensor([0]), 0)] == [(1,), (1, 0), (1, 0)]


def test_no_rows_draw_nothing() -> None:
    assert draw(torch.empty(0, 5), []).shape == greedy(torch.empty(0, 5)).shape == (0,)


@pytest.mark.parametrize(
    ("top_n", "delta", "expected"),
    [
        (4, 1.0, [True, True, True, True]),
        (2, 1.0, [True, True, False, False]),
        (4, 0.21, [True, True, False, False]),
        (1, 1.0, [True, False, False, False]),
        (4, 0.0, [True, False, False, False]),
    ],
)
def test_candidates_are_among_the_likeliest_and_near_the_first(top_n: int, delta: float, expected: list[bool]) -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(4, 4)
    assert is_candidate(logits, torch.arange(4), top_n, delta).tolist() == expected


def test_a_token_that_may_not_be_drawn_is_no_candidate() -> None:
    logits = torch.tensor([0.0, -1.0, -torch.inf]).expand(3, 3)
    assert is_candidate(logits, torch.arange(3), 10, 1.0).tolist() == [True, True, False]


def test_equally_likely_tokens_are_candidates_together() -> None:
    assert is_candidate(torch.zeros(3, 3), torch.arange(3), 1, 0.0).all()
