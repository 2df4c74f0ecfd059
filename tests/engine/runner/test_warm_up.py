from itertools import product
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from engine.backend import execute
from engine.batch import Batch, Row
from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.model.config import read_model_config
from engine.model.prompt_forms import absorbed_is_cheaper
from engine.runner.backend import ModelBackend
from engine.runner.sizes import padded_size, step_sizes
from engine.runner.steps import Steps
from engine.runner.warm_up import WAYS_TO_DRAW, StepKind, largest_steps, warm_up, warm_up_steps
from engine.settings.device import Hardware, resolve
from engine.step.shape import StepShape, shape_of
from engine.step.two_batch import NEVER
from mesh.domain.sampling import Sampling
from mesh.domain.sparse_prefill import SparsePrefill
from tests.support.checkpoints import model_backend, tiny_checkpoint
from tests.support.eager_graphs import EagerCapture

SHIPPED_MODEL = Path(__file__).parents[3] / "models/tiny-r1"
LIMITS = list(product((1, 17, 96, 300, 2048), (1, 2, 64, 100, 4096), (1, 2, 16)))


def steps_of(most_tokens: int, context_tokens: int, max_requests: int) -> tuple[list[int], list[list[Row]]]:
    sizes = step_sizes(min(max(most_tokens, max_requests), max_requests * context_tokens))
    return sizes, list(warm_up_steps(sizes, context_tokens, max_requests, block=7))


def tokens_of(rows: list[Row]) -> int:
    return sum(row.end - row.start for row in rows)


@pytest.mark.parametrize("limits", LIMITS)
def test_every_size_is_run_and_none_that_serving_cannot_meet(limits: tuple[int, int, int]) -> None:
    _, context_tokens, max_requests = limits
    sizes, steps = steps_of(*limits)
    assert {padded_size(tokens_of(rows), sizes) for rows in steps} == set(sizes)
    assert all(len(rows) <= max_requests for rows in steps)
    assert all(row.end <= context_tokens and row.token_ids for rows in steps for row in rows)


def test_rows_of_one_token_come_first() -> None:
    for rows in (rows for limits in LIMITS for rows in steps_of(*limits)[1]):
        assert [len(row.token_ids) > 1 for row in rows] == sorted(len(row.token_ids) > 1 for row in rows)


def test_rows_attend_in_every_form() -> None:
    config = read_model_config(SHIPPED_MODEL)
    rows = [row for step in steps_of(2048, 16384, 64)[1] for row in step if row.end - row.start > 1]
    later = [row for row in rows if row.start]
    forms = {absorbed_is_cheaper(config, queries=row.end - row.start, context=row.end) for row in later}
    assert len(rows) > len(later) and forms == {True, False}


def test_prompts_run_with_each_number_of_drawing_rows() -> None:
    drawing = {len(rows) for rows in steps_of(2048, 16384, 100)[1] if max(row.end - row.start for row in rows) > 1}
    assert drawing.issuperset(step_sizes(100))


def test_rows_run_with_all_drafts_alone_and_with_prompts() -> None:
    sizes = step_sizes(2048)
    steps = list(warm_up_steps(sizes, 4096, 16, block=7, drafts=2))
    drafted = [[row.drafts for row in rows] for rows in steps if any(row.drafts for row in rows)]
    assert drafted == [[1, 0], [2, 0], *([2] * count for count in step_sizes(16))]
    assert all(row.end <= 4096 for rows in steps for row in rows)
    undrafted = [rows for rows in steps if not any(row.drafts for row in rows)]
    assert undrafted == list(warm_up_steps(sizes, 4096, 16, block=7))


def test_tokens_are_drawn_in_every_way_alone_and_together() -> None:
    _, steps = steps_of(2048, 16384, 64)

    def ways(rows: list[Row]) -> set[str]:
        samplings = [row.sampling for row in rows]
        return {"none" if sampling is None else _way(sampling) for sampling in samplings}

    assert [ways(rows) for rows in steps[-7:]] == [
        {"greedy", "drawn", "reported", "penalized", "biased", "none"},
        {"greedy", "drawn", "reported", "penalized", "biased"},
        {"greedy"}, {"drawn"}, {"reported"}, {"penalized"}, {"biased"},
    ]  # fmt: skip


def _way(sampling: Sampling) -> str:
    if sampling.changes_logits:
        return "penalized" if sampling.counts_tokens else "biased"
    if sampling.top_logprobs is not None:
        return "reported"
    return "drawn" if sampling.temperature else "greedy"


def test_blocks_of_requests_are_left_alone(tmp_path: Path) -> None:
    backend = model_backend(tiny_checkpoint(tmp_path), context_tokens=200, max_requests=4)
    pool = backend.state.kv_pool
    with torch.inference_mode():
        pool.fill_(0.5)
    for rows in warm_up_steps(step_sizes(300), backend.context_tokens, 4, backend.state.padding_block):
        execute(backend, Batch(0, rows))
    written = (pool != 0.5).flatten(2).any(dim=2)[:-1]
    assert written.any(dim=0).nonzero().flatten().tolist() == [backend.state.padding_block]


@pytest.mark.parametrize("limits", [(2048, 4096, 64), (96, 40, 4), (2048, 200_000, 16)])
def test_the_largest_steps_are_within_the_limits(limits: tuple[int, int, int]) -> None:
    tokens, context_tokens, max_requests = limits
    sparse = SparsePrefill(0, 0.9)
    prompts, sparse_prompts, costly, drafted = largest_steps(*limits, block=7, drafts=3, sparse=sparse)
    assert tokens_of(prompts) == tokens_of(sparse_prompts) == tokens
    assert all(row.sparse == sparse for row in sparse_prompts)
    assert len(costly) == len(drafted) == max_requests and all(row.drafts == 3 for row in drafted)
    assert all(row.end <= context_tokens for rows in (prompts, costly, drafted) for row in rows)


@pytest.mark.parametrize("drafts", [0, 2])
def test_the_largest_steps_touch_no_block_of_a_request(drafts: int, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, num_nextn_predict_layers=1)
    backend = model_backend(checkpoint, max_requests=4, drafts=DraftsConfig(next_n=drafts))
    with torch.inference_mode():
        backend.state.kv_pool.fill_(0.5)
    for rows in largest_steps(96, backend.context_tokens, 4, backend.state.padding_block, drafts, None):
        execute(backend, Batch(0, rows), replace(shape_of(rows), drafts=drafts))
    written = (backend.state.kv_pool != 0.5).flatten(2).any(dim=2).any(dim=0)
    assert written.nonzero().flatten().tolist() == [backend.state.padding_block]


@pytest.mark.gpu
def test_a_gpu_makes_its_pool_and_graphs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([1, 0])
    monkeypatch.setattr("engine.runner.backend.lacking_bytes", lambda *_: next(answers))
    config = EngineConfig(model_dir=SHIPPED_MODEL, device="cuda", max_requests=8, drafts=DraftsConfig(next_n="auto"))
    before = torch.cuda.memory_allocated()
    backend = ModelBackend(resolve(config, Hardware(torch.cuda.device_count(), 1 << 30)))
    assert next(answers, None) is None
    pool = backend.state.kv_pool
    # The first pool is gone.
    assert torch.cuda.memory_allocated() - before < 1.5 * pool.numel() * pool.itemsize + (2 << 30)
    execute(backend, Batch(0, [Row([0] * 40, 0, [0], Sampling())]))


def test_only_captured_steps_run_over_all_layers_after_short_contexts(tmp_path: Path) -> None:
    config = EngineConfig(model_dir=tiny_checkpoint(tmp_path), total_blocks=64, context_tokens=200, max_requests=4)
    backend = ModelBackend(resolve(config, Hardware(0, 1 << 30)))
    backend.steps.capture([1, 4], 200, EagerCapture(), NEVER)
    whole: dict[bool, list[StepShape]] = {True: [], False: []}
    longest = {True: 0, False: 0}

    def run(steps: Steps, batch: Batch, shape: StepShape) -> None:
        if batch.rows:
            captured = steps is backend.steps
            whole[captured].append(shape)
            longest[captured] = max(longest[captured], *(row.end for row in batch.rows))

    warm_up(run, backend.steps, backend.state, config, step_sizes(64), 200, set())
    assert all(shape.decode_only for shape in whole[True]) and not any(shape.decode_only for shape in whole[False])
    assert len(whole[True]) == 1 + len(WAYS_TO_DRAW) and len(whole[False]) > len(step_sizes(64))
    assert longest == {True: 2, False: 200}


def test_a_process_runs_no_step_twice(tmp_path: Path) -> None:
    """The process serves in one role, then in the other, whose steps are larger, then in the first one again."""
    ran: list[StepShape] = []
    config = EngineConfig(model_dir=tiny_checkpoint(tmp_path), total_blocks=64, context_tokens=200, max_requests=4)
    backend = ModelBackend(resolve(config, Hardware(0, 1 << 30)))
    warm: set[StepKind] = set()
    counts = []
    for most in (64, 128, 64):
        ran.clear()
        sizes = step_sizes(most)
        warm_up(lambda *step: ran.append(step[-1]), backend.steps, backend.state, config, sizes, 200, warm)
        counts.append(len(ran))
    first, larger, again = counts
    # Two steps without rows are run each time.
    assert first > larger > again == 2
