"""Steps of several kinds that run for the first time at once."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Barrier, current_thread
from typing import Any

import pytest
import torch

from engine.backend import Launched
from engine.batch import Batch, Row
from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.exchange.host import HostExchange
from engine.model.context import DeviceState
from engine.model.model import Model
from engine.parallel.config import ParallelConfig
from engine.parallel.layout import Layout
from engine.parallel.peers import Peers
from engine.runner import first_runs
from engine.runner.backend import ModelBackend
from engine.runner.first_runs import can_run_at_once, compiling_draws, run_first
from engine.runner.graph_sizes import graph_sizes
from engine.runner.launched_step import StepEvents
from engine.runner.micro_batches import MicroBatches
from engine.runner.sampler import draw_nothing, draw_tokens
from engine.runner.sizes import step_sizes
from engine.runner.steps import Steps
from engine.runner.warm_up import StepKind, warm_up
from engine.settings.device import Hardware, ResolvedEngineConfig, resolve
from engine.step.shape import StepShape
from mesh.domain.sampling import Sampling
from tests.support.checkpoints import tiny_checkpoint
from tests.support.eager_graphs import pad_steps
from tests.support.family import FAMILY
from tests.support.rank_threads import on_each_rank

CONTEXT, SIZES = 100, step_sizes(64)
WAIT_SECONDS = 20.0
# Whole blocks of 128.
WIDTHS = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128}
KINDS = {"first prompts", "first later", "first mixed", "first decoding", "first drawing"}


class Runs:
    """A backend whose first runs are noted."""

    def __init__(self, directory: Path) -> None:
        checkpoint = tiny_checkpoint(directory, num_hidden_layers=6)
        config = EngineConfig(
            model_dir=checkpoint,
            device="cpu",
            max_requests=4,
            context_tokens=CONTEXT,
            total_blocks=8,
            max_step_tokens=64,
        )
        self.resolved: ResolvedEngineConfig = resolve(config, Hardware(0, 1 << 30))
        self.backend = ModelBackend(self.resolved)
        self.ran: dict[str, list[tuple[StepShape, int]]] = {}
        self.layers: set[int] = set()
        self.barrier = Barrier(len(KINDS))
        self.fails = ""

    def run(self, warm: set[StepKind]) -> None:
        run_first(self._make, self.backend.weights, self.resolved, SIZES, CONTEXT, warm)

    def _make(self, model: Model, state: DeviceState, batches: MicroBatches) -> Steps:
        name = current_thread().name
        # All threads get here, or none goes on.
        self.barrier.wait(WAIT_SECONDS)
        if name == self.fails:
            raise RuntimeError("no memory")
        self.layers.add(len(model.layers))
        assert state is not self.backend.state
        steps = self.backend._make_steps(model, state, batches)
        launch, ran = steps.launch, self.ran.setdefault(name, [])

        def noted(batch: Batch, shape: StepShape, events: StepEvents | None) -> Launched:
            ran.append((shape, batches.size(shape.tokens)))
            return launch(batch, shape, events)

        steps.launch = noted  # type: ignore[method-assign]
        return steps


def left(runs: Runs, warm: set[StepKind]) -> Sequence[StepShape]:
    """The steps that the warm-up still runs."""
    ran: list[StepShape] = []
    backend, config = runs.backend, runs.resolved.config
    pad_steps(backend, SIZES)
    warm_up(lambda *step: ran.append(step[-1]), backend.steps, backend.state, config, SIZES, CONTEXT, warm)
    return [shape for shape in ran if shape.rows]


def test_a_warm_up_has_only_steps_that_decode_left(tmp_path: Path) -> None:
    runs, warm = Runs(tmp_path), set[StepKind]()
    assert any(not shape.decode_only for shape in left(runs, set()))
    runs.run(warm)
    assert runs.ran.keys() == KINDS and runs.layers == {len(runs.backend.weights.short().layers)}
    assert left(runs, warm) and all(shape.decode_only for shape in left(runs, set(warm)))


def test_rows_of_graphs_run_as_they_are(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    runs.run(set())
    sizes = [rows for rows in graph_sizes(runs.resolved.config) if rows <= 4]
    assert {(shape.rows, size) for shape, size in runs.ran["first decoding"]} >= {(rows, rows) for rows in sizes}
    assert {size for _, size in runs.ran["first prompts"]} == {*SIZES}


def test_the_warm_up_runs_again_what_failed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    runs, warm = Runs(tmp_path), set[StepKind]()
    runs.fails = "first later"
    with caplog.at_level(logging.INFO, "deepmesh.engine"):
        runs.run(warm)
    assert [vars(record)["fields"]["kind"] for record in caplog.records if "failed" in record.message] == ["later"]
    assert any(not shape.decode_only for shape in left(runs, warm)) and "first prompts" in runs.ran


def alone(directory: Path, peers: Peers | None = None, **settings: Any) -> bool:
    config = EngineConfig(model_dir=directory, device="cpu", dtype="bfloat16", total_blocks=8, **settings)
    resolved = resolve(config, Hardware(0, 1 << 30))
    model = ModelBackend(resolved, exchange=None if peers is None else HostExchange(peers)).weights
    return can_run_at_once(model, resolved)


def test_a_plain_model_of_one_rank_runs_kinds_at_once(tmp_path: Path) -> None:
    plain = tiny_checkpoint(tmp_path / "plain", dtype="bfloat16", num_nextn_predict_layers=1)
    assert alone(plain)
    assert not alone(plain, drafts=DraftsConfig(next_n=1)) and not alone(plain, memory_share=0.5)
    assert not alone(tiny_checkpoint(tmp_path / "fp8", dtype="float8", **WIDTHS), weights="quantized")
    assert not alone(tiny_checkpoint(tmp_path / "indexed", dtype="bfloat16", **FAMILY["deepseek-v3.2"]))


def test_ranks_of_a_group_do_not_run_kinds_at_once(tmp_path: Path) -> None:
    checkpoint, parallel = tiny_checkpoint(tmp_path, dtype="bfloat16"), ParallelConfig(dp=2)
    assert on_each_rank(Layout(dp=2, ep=2), lambda peers: alone(checkpoint, peers, parallel=parallel)) == [False, False]


def test_draws_are_compiled_while_weights_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[object, ...]] = []
    monkeypatch.setattr(first_runs, "draw_nothing", lambda *given: drawn.append((*given, current_thread().name)))
    config = EngineConfig(model_dir=tmp_path, device="cpu", dtype="bfloat16")
    with compiling_draws(8, replace(resolve(config, Hardware(0, 1 << 30)), warm_up=True)):
        pass
    assert drawn == [(8, torch.bfloat16, torch.device("cpu"), "first draws")]


def test_nothing_is_drawn_in_all_ways() -> None:
    draw_nothing(50, torch.bfloat16, torch.device("cpu"))


@pytest.mark.gpu
def test_later_draws_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    knobs = pytest.importorskip("triton").knobs
    draw_nothing(1000, torch.bfloat16, torch.device("cuda"))
    compiled: list[object] = []
    monkeypatch.setattr(knobs.compilation, "listener", lambda **found: compiled.append(found["src"]))
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.randn(5, 1000, device="cuda").to(dtype)
        rows = [Row([1], 3, [0], sampling) for sampling in (Sampling(), *[Sampling(temperature=0.5, top_k=3)] * 4)]
        draw_tokens(logits, rows)
    assert not compiled
