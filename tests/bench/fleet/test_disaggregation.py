"""The costs and the meshes that goodput is predicted from."""

from dataclasses import replace
from pathlib import Path

import pytest

from bench.fleet.disaggregation import Counted, costs_of, fleet_of, lines, predict, wrong_setting
from bench.node.served_meshes import DIVIDED_TOKENS, MESHES, PREFILL_STEP_TOKENS, PROMPT_WAIT_STEPS, Options
from engine.parallel.config import ParallelConfig
from mesh.costs import CostModel

OPTIONS = Options((8.0,), 2.0, 400, 20, 9, None, 32, 4)


def test_a_cut_model_takes_what_was_measured() -> None:
    # bench.node.balance: nine layers, uniform choices (bench/node/notes.md).
    costs = costs_of(4, 9)
    assert costs.decode_ms(64) == pytest.approx(4.91, rel=0.01)
    assert prompts_per_second(costs) * 3500 == pytest.approx(59_549, rel=0.01)


def test_the_depth_that_was_measured_is_as_it_was_measured() -> None:
    assert costs_of(4, 61).decode_ms(96) == pytest.approx(39.80)
    assert costs_of(2, 11).decode_ms(64) == pytest.approx(8.46)
    assert prompts_per_second(costs_of(4, 61)) * 3500 == pytest.approx(7997, rel=0.001)


def prompts_per_second(costs: CostModel) -> float:
    """Prompts have 3,500 tokens, and steps 8,192."""
    return 1000 / (costs.prefill_ms(3500) + costs.prefill_step_ms * 3500 / 8192)


def test_the_simulated_meshes_are_set_as_those_that_are_measured(tmp_path: Path) -> None:
    ifb, aligned, divided, pd = (fleet_of(mesh, OPTIONS, tmp_path) for mesh in MESHES)
    assert (ifb.decode.ranks, ifb.decode.prompt_wait_steps, ifb.prefill.replicas) == (4, 0, 0)
    assert (aligned.decode.ranks, aligned.decode.prompt_wait_steps) == (4, PROMPT_WAIT_STEPS)
    assert (divided.decode.ranks, divided.decode.context_parallel_tokens) == (4, DIVIDED_TOKENS)
    assert (pd.decode.ranks, pd.prefill.ranks, pd.prefill.max_step_tokens) == (2, 2, PREFILL_STEP_TOKENS)
    assert pd.decode.prompt_wait_steps == ParallelConfig().prompt_wait_steps
    assert ifb.decode.max_requests == pd.prefill.max_requests == OPTIONS.max_requests


def test_what_is_set_for_a_mesh_is_simulated(tmp_path: Path) -> None:
    settings = ("decode.engine.mixed_step_ms=62.5", "decode.engine.max_step_tokens=1024")
    ifb = fleet_of("ifb", replace(OPTIONS, settings=settings), tmp_path)
    assert (ifb.decode.mixed_step_ms, ifb.decode.max_step_tokens) == (62.5, 1024)
    assert fleet_of("ifb", OPTIONS, tmp_path).decode.mixed_step_ms == "auto"


def test_each_mesh_serves_the_requests_of_the_measurement() -> None:
    found = [predict(mesh, 8.0, OPTIONS, Counted()) for mesh in MESHES]
    assert len({each.summary.requests for each in found}) == 1
    assert len({each.summary.output_tokens for each in found}) == 1
    assert all(each.summary.completed == each.summary.requests > 5 for each in found)
    assert sum(line.startswith("| ") for line in lines(found)) == 1 + len(MESHES)


def test_ranks_answer_evenly_beside_prompts_that_they_divide() -> None:
    options = Options((8.0,), 5.0, 3500, 300, 20, None, 96, 2)
    whole = replace(options, settings=("decode.engine.mixed_step_ms=null",))
    found = [predict("divided ifb", 8.0, each, Counted(tpot_ms=150.0)).summary for each in (options, whole)]
    late = [each.itl_ms.p99 for each in found if each.itl_ms is not None]
    assert late[0] < 0.5 * late[1]
    assert [(each.completed, each.goodput.share) for each in found] == [(found[0].requests, 1.0)] * 2


def test_a_setting_without_effect_is_found() -> None:
    right = ["decode.engine.parallel.prompt_wait_steps=48", "prefill.engine.max_step_tokens=2048"]
    right += ["decode.engine.mixed_step_ms=62.5", "decode.engine.prompt_share=0.33"]
    right += ["decode.engine.parallel.context_parallel_tokens=null"]
    assert wrong_setting(right) is None
    for wrong in (
        "decode.engine.nonsense=1",
        "gateway.engine.max_requests=1",
        "decode.engine.max_step_tokens=many",
        "decode.engine.max_step_tokens=62.5",
        "decode.engine.mixed_step_ms=",
        "decode.engine.prompt_share=2",
        "decode.engine.prompt_share=0.0",
    ):
        assert wrong_setting([*right, wrong]) == wrong
