"""The layout of ranks whose number alone is configured."""

from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.model.config import read_model_config
from engine.parallel.config import FEWEST_DIVIDED, ParallelConfig
from engine.settings.layout import choose_parallel, choose_tp
from mesh.domain.workers import WorkerRole
from tests.support.checkpoints import tiny_checkpoint
from tests.support.engines import oracle_config


def test_ranks_that_decode_batch_requests_of_their_own() -> None:
    chosen, why = choose_parallel(oracle_config(parallel=ParallelConfig(ranks=4)), WorkerRole.DECODE, None)
    assert chosen == ParallelConfig(tp=1, dp=4, ep=4)
    assert "batch requests of their own" in why


def test_ranks_of_a_prefill_worker_compute_a_prompt_together() -> None:
    chosen, why = choose_parallel(oracle_config(parallel=ParallelConfig(ranks=4, ep=2)), WorkerRole.PREFILL, None)
    assert chosen == ParallelConfig(tp=4, dp=1, ep=2)
    assert "compute a prompt together" in why


def test_as_many_compute_a_prompt_together_as_divide_the_model(tmp_path: Path) -> None:
    # There are four heads, and a vocabulary that two ranks can divide but four cannot.
    config = EngineConfig(model_dir=tmp_path, parallel=ParallelConfig(ranks=4))
    model = read_model_config(tiny_checkpoint(tmp_path, vocab_size=322))
    assert choose_parallel(config, WorkerRole.PREFILL, model)[0] == ParallelConfig(tp=2, dp=2, ep=4)


def test_an_indivisible_model_is_computed_whole_on_each_rank() -> None:
    tp, why = choose_tp(3, WorkerRole.PREFILL, lambda tp: tp == 1)
    assert tp == 1 and "divides the model's heads" in why


@pytest.mark.parametrize("role", [WorkerRole.DECODE, WorkerRole.PREFILL])
@pytest.mark.parametrize("asked", [{}, {"tp": 2}, {"dp": 2}, {"ranks": 4, "tp": 2}, {"tp": 2, "dp": 3, "ep": 1}])
def test_what_is_configured_stays(role: WorkerRole, asked: dict[str, int]) -> None:
    chosen, why = choose_parallel(oracle_config(parallel=ParallelConfig.model_validate(asked)), role, None)
    assert why == "as configured"
    assert chosen.model_dump().items() >= (asked.items() - {("ranks", 4)})
    assert chosen.world == ParallelConfig.model_validate(asked).world


def test_the_choice_leaves_other_settings_as_they_are() -> None:
    asked = ParallelConfig(ranks=4, prompt_wait_steps=8)
    chosen, _ = choose_parallel(oracle_config(parallel=asked), WorkerRole.DECODE, None)
    assert chosen == ParallelConfig(tp=1, dp=4, ep=4, prompt_wait_steps=8)


def test_ranks_of_one_host_compute_long_prompts_together() -> None:
    assert ParallelConfig(dp=2).divided_tokens == FEWEST_DIVIDED
    for parallel in (ParallelConfig(dp=1), ParallelConfig(tp=2, dp=2), ParallelConfig(dp=2, hosts=2)):
        assert parallel.divided_tokens is None
    assert ParallelConfig(dp=2, hosts=2, context_parallel_tokens=7).divided_tokens == 7
    assert ParallelConfig(dp=2, context_parallel_tokens=None).divided_tokens is None


@pytest.mark.parametrize("tokens", [7, "auto"])
def test_no_prompt_is_divided_where_no_rank_can(tokens: object) -> None:
    for layout in ({"tp": 2, "dp": 2}, {"dp": 1}):
        apart = ParallelConfig.model_validate({**layout, "context_parallel_tokens": tokens})
        assert apart.divided_tokens is None


def test_ranks_without_a_layout_divide_prompts_as_ranks_that_decode() -> None:
    for layout in ({"ranks": 4}, {"ranks": 4, "tp": 1}):
        parallel = ParallelConfig.model_validate({**layout, "context_parallel_tokens": "auto"})
        chosen, _ = choose_parallel(oracle_config(parallel=parallel), WorkerRole.DECODE, None)
        assert parallel.divided_tokens == chosen.divided_tokens == FEWEST_DIVIDED


def test_ranks_that_are_to_answer_one_quickly_compute_it_together() -> None:
    asked = oracle_config(parallel=ParallelConfig(ranks=4), aim="latency")
    chosen, why = choose_parallel(asked, WorkerRole.DECODE, None)
    assert chosen == ParallelConfig(tp=4, dp=1, ep=1)
    assert "as fast as can be" in why
