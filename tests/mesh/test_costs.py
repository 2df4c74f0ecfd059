from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.cost_file import CostFile, load_costs, save_costs
from mesh.costs import CostModel
from mesh.errors import ConfigError

STEPS = CostModel(decode_steps=((1.0, 12.0), (8.0, 24.0), (64.0, 34.0)))


def test_a_measured_step_takes_what_was_measured() -> None:
    assert [STEPS.decode_ms(requests) for requests in (1, 8, 64)] == [12.0, 24.0, 34.0]


def test_between_two_measured_steps_time_is_linear() -> None:
    assert STEPS.decode_ms(36) == pytest.approx(29.0)


def test_beyond_the_last_measured_step_time_grows() -> None:
    assert STEPS.decode_ms(120) == pytest.approx(44.0)


def test_one_measured_step_stands_for_all() -> None:
    assert CostModel(decode_steps=((4.0, 9.0),)).decode_ms(400) == 9.0


@given(st.floats(1, 60), st.integers(1, 200))
def test_requests_within_a_time_are_the_most_that_fit(ms: float, most: int) -> None:
    requests = STEPS.requests_within(ms, most)
    assert requests == sum(STEPS.decode_ms(count) <= ms for count in range(1, most + 1))


def test_context_beyond_what_was_measured_lengthens_a_step() -> None:
    costs = msgspec.structs.replace(STEPS, decode_context_tokens=1000.0, decode_context_ms=2.0)
    assert costs.step_ms(8, 8000, 0.0) == 24.0
    assert costs.step_ms(8, 1_008_000, 0.0) == pytest.approx(26.0)


def test_context_beyond_a_selection_costs_its_scores_alone() -> None:
    costs = msgspec.structs.replace(
        STEPS, decode_context_tokens=1000.0, decode_context_ms=20.0, selected_tokens=2000.0, index_context_ms=1.0
    )
    assert costs.step_ms(8, 8 * 1000, 0.0) == 24.0
    # 1,000 tokens more are attended to and scored, and no more than these are attended to.
    assert costs.step_ms(8, 8 * 2000, 0.0) == pytest.approx(24 + 8 * (0.02 + 0.001))
    assert costs.step_ms(8, 8 * 102_000, 0.0) == pytest.approx(24 + 8 * (0.02 + 0.101))


@pytest.mark.parametrize(("of_prompts", "most"), [(None, 2000), (4000.0, 4000)])
@given(cached=st.integers(0, 5000), tokens=st.integers(1, 5000))
def test_a_prompts_pairs_are_those_selected_and_those_scored(
    of_prompts: float | None, most: int, cached: int, tokens: int
) -> None:
    costs = CostModel(
        prefill_pairs_ms=30.0, selected_tokens=2000.0, prompt_selected_tokens=of_prompts, index_pairs_ms=2.0
    )
    places = [place + 0.5 for place in range(cached, cached + tokens)]
    expected = sum(1000 / 5000 + (min(place, most) * 30.0 + place * 2.0) / 1e6 for place in places)
    assert costs.prefill_ms(tokens, cached) == pytest.approx(expected, rel=1e-6)


def test_decoding_with_prompts_adds_its_share_of_a_step() -> None:
    assert STEPS.step_ms(8, 0, 100.0) == 124.0
    costs = msgspec.structs.replace(STEPS, decode_beside_prompts=0.25)
    assert costs.step_ms(8, 0, 100.0) == 106.0
    assert costs.step_ms(8, 0, 0.0) == 24.0
    # The weights are read however few tokens of prompts there are.
    assert costs.step_ms(8, 0, 10.0) == 24.0
    slow = msgspec.structs.replace(STEPS, decode_beside_prompts=1.5)
    assert (slow.step_ms(8, 0, 100.0), slow.step_ms(8, 0, 0.0)) == (136.0, 24.0)


def test_a_step_with_prompts_takes_time_besides_their_tokens() -> None:
    costs = msgspec.structs.replace(STEPS, prefill_step_ms=20.0)
    assert (costs.step_ms(0, 0, 10.0), costs.step_ms(0, 0, 0.0)) == (30.0, 0.0)
    assert (costs.step_ms(8, 0, 10.0), costs.step_ms(8, 0, 0.0)) == (54.0, 24.0)
    shared = msgspec.structs.replace(costs, decode_beside_prompts=0.25)
    assert (shared.step_ms(8, 0, 10.0), shared.step_ms(8, 0, 1.0)) == (36.0, 27.0)


def test_tokens_late_in_a_prompt_take_longer() -> None:
    costs = CostModel(prefill_tokens_per_second=1000.0, prefill_pairs_ms=1.0)
    assert costs.prefill_ms(1000, 0) == pytest.approx(1000.5)
    assert costs.prefill_ms(1000, 1000) == pytest.approx(1001.5)


def test_sparse_attention_has_its_own_pairs_or_the_exact_ones() -> None:
    costs = CostModel(prefill_tokens_per_second=1000.0, prefill_pairs_ms=1.0)
    assert costs.sparse_prefill_ms(1000, 1000) == costs.prefill_ms(1000, 1000)
    sparse = msgspec.structs.replace(costs, sparse_pairs_ms=0.1)
    assert sparse.sparse_prefill_ms(1000, 1000) == pytest.approx(1000.15)
    assert sparse.prefill_ms(1000, 1000) == pytest.approx(1001.5)


def test_a_cost_file_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    file = CostFile(STEPS, device="a card", layout="ep8", error=0.02)
    save_costs(file, tmp_path / "costs.json")
    assert load_costs(tmp_path / "costs.json") == file


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "truncated"),
        ('{"costs": {"decode_stepz": []}}', "unknown field `decode_stepz`"),
        ('{"costs": {"decode_steps": []}}', "at least one point"),
        ('{"costs": {"decode_steps": [[8, 2], [1, 1]]}}', "ascending"),
        ('{"costs": {"prefill_tokens_per_second": 0}}', "above 0"),
        ('{"costs": {"prefill_tokens_per_second": "many"}}', "Expected `float`"),
    ],
)
def test_a_broken_cost_file_is_one_sentence(tmp_path: Path, content: str, told: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as refused:
        load_costs(path)
    assert told in refused.value.message and str(path) in refused.value.message
    assert "\n" not in refused.value.message


def test_a_missing_cost_file_is_named() -> None:
    with pytest.raises(ConfigError, match=r"absent\.json: No such file"):
        load_costs(Path("absent.json"))
