"""A loaded worker until it ends, with a server and links to schedulers that are stand-ins."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from mesh.errors import EngineFailed
from mesh.rpc.channel import Channels
from tests.support.store_agent import worker_identity
from worker import serving
from worker.serving import serve_worker


class Forever:
    """Waits, and notes that it was told to drain. Stands for a worker, a server and the wish for another role."""

    drained = False
    live_requests = 0

    async def run(self) -> None:
        await asyncio.Event().wait()

    until_signal = wait = run

    async def ready(self) -> None: ...

    async def drain(self, *_: Any) -> None:
        self.drained = True


class FailingLink:
    async def run(self) -> None:
        raise ValueError("a report that cannot be written")

    async def drain_reported(self, seconds: float) -> None: ...

    async def leave(self, seconds: float) -> None: ...


async def test_a_worker_whose_reports_fail_drains_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_status_links", lambda *_: [FailingLink()])
    worker, server = Forever(), Forever()
    ranks = SimpleNamespace(until_host_stops=Forever().run)
    worker.host = SimpleNamespace(identity=worker_identity(), ranks=ranks)  # type: ignore[attr-defined]
    config: Any = SimpleNamespace(server=SimpleNamespace(drain_seconds=0.0))
    change: Any = SimpleNamespace(wanted=Forever())
    with pytest.raises(ValueError, match="a report that cannot be written"):
        await serve_worker(worker, server, config, Channels(), change)  # type: ignore[arg-type]
    assert worker.drained and server.drained


async def test_a_signal_after_another_hosts_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "_status_links", lambda *_: [])
    signalled, parted = asyncio.Event(), asyncio.Event()
    worker, server = Forever(), Forever()

    async def run() -> None:
        await parted.wait()
        raise EngineFailed("a host of the worker was told to stop")

    async def host_stops() -> None: ...

    def part() -> None:
        signalled.set()
        parted.set()

    ranks = SimpleNamespace(until_host_stops=host_stops, part=part, kept=object())
    worker.host, worker.run = SimpleNamespace(identity=worker_identity(), ranks=ranks), run  # type: ignore
    server.until_signal = signalled.wait  # type: ignore
    config: Any = SimpleNamespace(server=SimpleNamespace(drain_seconds=0.0))
    change: Any = SimpleNamespace(wanted=Forever())
    assert await serve_worker(worker, server, config, Channels(), change) is None  # type: ignore[arg-type]
    assert worker.drained
