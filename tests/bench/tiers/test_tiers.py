"""The benches of a rank's tiers, over a tiny model on a CPU, where they compute all that they do on a GPU."""

import asyncio
from pathlib import Path

import pytest

from bench.tiers import rank
from bench.tiers.decode_steps import DecodeLoad, measure_steps, steps_table
from bench.tiers.first_tokens import HOST, POOL, RECOMPUTED, FirstTokens, PrefixBench, first_tokens_table
from bench.tiers.rank import TierBackend
from engine.config import EngineConfig
from engine.moves.host_slots import PlainSlots
from engine.settings.device import Hardware, resolve
from engine.weights.loading import make_model
from mesh.errors import EngineFailed
from tests.support.checkpoints import tiny_checkpoint


def backend_of(directory: Path, **sizes: int) -> TierBackend:
    config = EngineConfig(model_dir=tiny_checkpoint(directory), device="cpu", **sizes)  # type: ignore[arg-type]
    return TierBackend(config, make_model(resolve(config, Hardware(0, 1 << 30))))


def test_prefixes_are_found_wherever_they_lie(tmp_path: Path) -> None:
    backend = backend_of(tmp_path / "model", total_blocks=40, host_blocks=40, context_tokens=2048)
    rows = asyncio.run(PrefixBench(backend, [256, 1024], 1).measure("bf16", tmp_path))
    assert [(row.prefix_tokens, row.size_bytes) for row in rows] == [
        (256, 4 * backend.block_bytes),
        (1024, 16 * backend.block_bytes),
    ]
    assert first_tokens_table(rows, "").row_count == 16
    assert all({RECOMPUTED, POOL, HOST} < set(row.seconds) and len(row.seconds) == 8 for row in rows)


def test_only_an_engine_with_host_memory_moves_blocks(tmp_path: Path) -> None:
    load = DecodeLoad(requests=2, context=128, steps=8, gb_per_second=0.1)
    sizes = {"total_blocks": load.pool_blocks, "host_blocks": load.host_blocks, "context_tokens": 4096}
    rows = measure_steps(backend_of(tmp_path, **sizes, max_requests=8), load)
    assert steps_table(rows, load, "").row_count == 4
    assert [(row.what, row.host, row.gb_per_second > 0) for row in rows] == [
        ("prefixes are found", False, False),
        ("KV lands", False, False),
        ("prefixes are found", True, True),
        ("KV lands", True, True),
    ]


def test_memory_that_is_not_locked_in_time_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "LOCKING_SECONDS", 0.0)
    monkeypatch.setattr(PlainSlots, "count", property(lambda slots: 3, lambda slots, count: None), raising=False)
    with pytest.raises(EngineFailed, match="3 of 16 blocks"):
        backend_of(tmp_path, total_blocks=16, host_blocks=16)


def test_moving_is_what_the_pool_would_have_saved() -> None:
    row = FirstTokens("bf16", 2048, 144_000_000, 0.0027, {RECOMPUTED: 0.2, POOL: 0.03, HOST: 0.033})
    assert row.moving(HOST) == pytest.approx(0.003)
