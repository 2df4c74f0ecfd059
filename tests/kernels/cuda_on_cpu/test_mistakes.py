"""Mistakes in a source are noticed: each test changes a line of a source that other tests run as it is."""

import pytest
import torch

from tests.support.cuda_on_cpu.launches import CudaOnCpu
from tests.support.errors import relative_error
from tests.support.index_contexts import index_contexts
from tests.support.selected_contexts import SCALE, SelectedContexts

E4M3, CPU, TOKENS, LAUNCHES = torch.float8_e4m3fn, torch.device("cpu"), 6000, 8


def error_of_scores(on_cpu: CudaOnCpu) -> float:
    """For a context of more blocks than there is room for at once."""
    case = index_contexts([TOKENS], 1, 64, 128, E4M3, CPU)
    scores = torch.full((1, 64 * case.plan.block_table.shape[1]), float("nan"))
    on_cpu.module("index_scores.warpgroups").index_scores(case.queries, case.pool, case.plan, scores)
    products = case.queries.values[0].double() @ case.keys[0].double().t()
    return relative_error(scores[0, :TOKENS], case.queries.weights[0].double() @ products.clamp(min=0))


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("wait(&shared.full[stage], unit / STAGES & 1);", ""),
        ("wait(&shared.empty[stage], (unit / SHARED::BLOCKS & 1) ^ 1);", ""),
        ("wgmma_wait<0>();", "wgmma_wait<1>();"),
    ],
    ids=["keys are read too early", "keys are overwritten", "sums are read too early"],
)
def test_a_missing_wait_is_noticed(right: str, wrong: str, on_cpu: CudaOnCpu) -> None:
    on_cpu.make_mistake(on_cpu.module("index_scores.warpgroups").FEW_QUERIES.source, right, wrong)
    # The launch itself may find that it ends too early. In some orders of copies all is right.
    with pytest.raises(AssertionError):
        for _ in range(LAUNCHES):
            assert error_of_scores(on_cpu) < 0.01


def test_threads_that_wait_forever_end_the_launch(on_cpu: CudaOnCpu) -> None:
    source = on_cpu.module("index_scores.warpgroups").FEW_QUERIES.source
    on_cpu.make_mistake(source, "if (lane == 0) arrive(&shared.empty[stage]);", "")
    with pytest.raises(AssertionError, match="wait for each other forever"):
        error_of_scores(on_cpu)


def test_a_wrong_place_is_noticed(on_cpu: CudaOnCpu) -> None:
    gathered = on_cpu.module("mla_selected.gathered")
    on_cpu.make_mistake(gathered.FP8, "row * 128 + (column ^ (row & 7)) * 16;", "row * 128 + column * 16;")
    case = SelectedContexts([200], 1, 128, 64, (512, 576), E4M3, CPU)
    found = gathered.mla_selected(case.query, case.pool, case.plan, case.tokens, 512, SCALE, case.kv_scale)
    assert not case.error(found) < 0.5
