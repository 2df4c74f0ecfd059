"""What a worker measured before it served, kept for later starts."""

from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.exchange.host import HostExchange
from engine.oracle.backend import OracleBackend
from engine.pace.step_times import StepTimes
from engine.parallel.config import ParallelConfig
from engine.parallel.layout import Layout
from engine.parallel.peers import Peers
from engine.runner import kept_times
from engine.runner.backend import ModelBackend
from engine.runner.kept_times import KnownTimes, keep_times, known_times, read_times, times_file
from engine.settings.device import Hardware, resolve
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.workers import PromptPace, WorkerSpeed
from tests.support.checkpoints import tiny_checkpoint
from tests.support.engines import oracle_config
from tests.support.rank_threads import on_each_rank

TIMES = KnownTimes(WorkerSpeed(12.5, 8.0, PromptPace(3000.0, 64.0, 128.0)), StepTimes([1, 2], [[0.1, 0.2], [0.3, 0.4]]))


def config_of(checkpoint: Path, **settings: Any) -> EngineConfig:
    return EngineConfig(model_dir=checkpoint, device="cpu", total_blocks=4, max_step_tokens=64, threads=1, **settings)


def backend_of(config: EngineConfig, kept: Path | None, peers: Peers | None = None) -> ModelBackend:
    exchange = None if peers is None else HostExchange(peers)
    return ModelBackend(resolve(config, Hardware(0, 1 << 30)), exchange=exchange, kept=kept)


def test_a_second_start_takes_what_the_first_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, cache = config_of(tiny_checkpoint(tmp_path / "model", num_hidden_layers=2)), tmp_path / "cache"
    first = backend_of(config, cache).speed
    assert first is not None and first.decode_step_ms > 0 < first.prompts.tokens_per_second
    monkeypatch.setattr(kept_times, "measure_speed", None)
    assert backend_of(config, cache).speed == first
    assert backend_of(config, None).speed is None


def test_ranks_measure_together_though_one_knows(tmp_path: Path) -> None:
    config = config_of(tiny_checkpoint(tmp_path / "model", num_hidden_layers=2), parallel=ParallelConfig(tp=1, dp=2))

    def speed_of(peers: Peers) -> WorkerSpeed | None:
        backend_of(config, tmp_path / "known", peers)
        return backend_of(config, tmp_path / ("empty" if peers.place.rank else "known"), peers).speed

    assert all(on_each_rank(Layout(dp=2, ep=2), speed_of))


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ({}, True),
        # What "auto" means on a CPU.
        ({"weights": "dequantized"}, True),
        ({"max_requests": 8}, False),
        ({"max_step_tokens": 128}, False),
        ({"parallel": ParallelConfig(dp=2)}, False),
    ],
)
def test_other_configurations_have_other_files(tmp_path: Path, changes: dict[str, Any], same: bool) -> None:
    checkpoint = tiny_checkpoint(tmp_path / "model", num_hidden_layers=2)
    backend = backend_of(config_of(checkpoint), None)

    def file_of(config: EngineConfig) -> Path:
        resolved = resolve(config, Hardware(0, 1 << 30))
        return times_file(tmp_path, backend.weights.config, KvNamespace("", "", 1, ""), resolved)

    config = config_of(checkpoint)
    assert (file_of(config.model_copy(update=changes)) == file_of(config)) == same


def test_another_version_measures_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, cache = config_of(tiny_checkpoint(tmp_path / "model", num_hidden_layers=2)), tmp_path / "cache"
    for version in ("1", "2", "1"):
        monkeypatch.setattr(kept_times, "package_version", lambda version=version: version)
        backend_of(config, cache)
    assert len([*cache.iterdir()]) == 2


def test_a_file_that_says_something_else_is_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "times.json"
    assert read_times(file) is None
    keep_times(file, TIMES)
    assert read_times(file) == TIMES
    for text in ("{", "[]", '{"speed": {"decode_step_ms": "fast"}}'):
        file.write_text(text, encoding="utf-8")
        assert read_times(file) is None


def test_a_gpu_keeps_how_long_steps_with_drafts_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU they are measured at each start."""
    config = oracle_config(drafts=DraftsConfig(next_n="auto"))
    backend, file = OracleBackend(config), tmp_path / "times.json"
    steps = [StepTimes([1], [[seconds] * 6]) for seconds in (1.0, 2.0, 3.0)]
    measured = iter(steps)
    monkeypatch.setattr(kept_times, "measure_depths", lambda *_: next(measured))
    monkeypatch.setattr(kept_times, "measure_speed", lambda *_: TIMES.speed)

    def found(asynchronous: bool) -> StepTimes | None:
        backend.asynchronous = asynchronous
        return known_times(backend, file, config, 0, float).steps

    assert [found(False), found(False)] == steps[:2]
    file.unlink()
    assert [found(True), found(True)] == [steps[2], steps[2]]
