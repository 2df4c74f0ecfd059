"""`python -m kvstore` as a process."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kvstore.disk.tier import prepare_directory
from launcher.process import Child
from mesh.errors import ConfigError
from mesh.ports import free_port
from mesh.rpc.channel import Channels
from tests.support.forking import forked_services
from tests.support.programs import ROOT
from tests.support.waiting import eventually

MAX_RESIDENT_BYTES = 150 * 1024 * 1024


def store(*settings: str, show: Callable[[str, str], None] = lambda *_: None) -> Child:
    command = [sys.executable, "-m", "kvstore", "--config", str(ROOT / "configs/kvstore.yaml")]
    return Child("kvstore", [*command, *(part for each in settings for part in ("--set", each))], show)


async def test_a_store_starts_small_idles_and_stops_at_a_signal() -> None:
    port, printed = free_port(), list[str]()
    child = store(f"server.port={port}", "server.metrics_port=0", show=lambda _, line: printed.append(line))
    await child.start()
    try:
        await child.wait_ready(f"127.0.0.1:{port}", Channels(), 90)
        process = psutil.Process(child.process_id)
        assert process.memory_info().rss < MAX_RESIDENT_BYTES

        async def idle() -> bool:
            before = process.cpu_times()
            await asyncio.sleep(1)
            after = process.cpu_times()
            return (after.user - before.user) + (after.system - before.system) < 0.05

        # It may still be at what follows its start, and on a busy machine anything costs more now and then.
        await eventually(idle)
        os.kill(child.process_id, signal.SIGTERM)
        assert await child.wait() == 0
        # Nor does UCX, or gRPC, say anything.
        assert printed and [line for line in printed if " INFO  kvstore " not in line] == []
    finally:
        await child.stop(5)


async def test_a_store_whose_path_is_a_file_does_not_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, why in ((tmp_path / "file", "is not a directory"), (tmp_path / "file/below", "not a directory")):
        child = store(f"server.port={free_port()}", "server.metrics_port=0", f"disk.path={path}")
        with forked_services():
            await child.start()
        assert await child.wait() == 2
        assert f"disk.path: {path} {why}" in child.last_words or f"cannot write to {path}: {why}" in child.last_words


def test_a_directory_that_may_not_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_directory(tmp_path / "made/for/it")
    assert (tmp_path / "made/for/it").is_dir()
    # Tests may run as root, who may write anywhere.
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(ConfigError, match=rf"disk\.path: cannot write to {tmp_path}: permission denied"):
        prepare_directory(tmp_path)


async def test_a_store_with_an_invalid_redis_url_does_not_start() -> None:
    child = store(f"server.port={free_port()}", "server.metrics_port=0", "index.redis_url=http://localhost")
    with forked_services():
        await child.start()
    assert await child.wait() == 2
    assert "redis_url" in child.last_words
