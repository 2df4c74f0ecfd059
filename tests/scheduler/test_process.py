"""`python -m scheduler` as a process."""

import asyncio
import os
import signal
import sys
from typing import Any

import psutil
import pytest
from deepmesh.internal.v1 import scheduler_pb2

from launcher.process import Child
from mesh.ports import free_port
from mesh.rpc.channel import Channels
from scheduler.__main__ import running
from scheduler.config import SchedulerConfig
from scheduler.registry import Registry
from tests.support.programs import ROOT
from tests.support.scheduler_server import ReportingWorker, identity_message, scheduler_stub
from tests.support.waiting import PATIENCE_SECONDS

MAX_RESIDENT_BYTES = 150 * 1024 * 1024


async def place_and_report(stub: Any, request_id: str) -> None:
    await stub.Place(
        scheduler_pb2.PlaceRequest(
            generation_id=request_id, request_id=request_id, model="oracle", prompt_tokens=64, max_tokens=10
        )
    )
    outcome = scheduler_pb2.PLACEMENT_OUTCOME_FINISHED
    await stub.ReportOutcome(scheduler_pb2.ReportOutcomeRequest(generation_id=request_id, outcome=outcome))


async def test_a_scheduler_starts_stays_small_and_stops() -> None:
    port = free_port()
    endpoint = f"127.0.0.1:{port}"
    command = [sys.executable, "-m", "scheduler", "--config", str(ROOT / "configs/scheduler.yaml")]
    settings = [f"server.port={port}", "server.metrics_port=0", "placement.queue_requests=2000", "lease.seconds=60"]
    child = Child("scheduler", [*command, *(part for each in settings for part in ("--set", each))], lambda *_: None)
    await child.start()
    try:
        await child.wait_ready(endpoint, Channels(), 90)
        async with scheduler_stub(endpoint) as stub:
            worker = await ReportingWorker(stub, identity_message()).start()
            await asyncio.gather(*(place_and_report(stub, f"r{number}") for number in range(1000)))
            worker.stop()
        assert psutil.Process(child.process_id).memory_info().rss < MAX_RESIDENT_BYTES
        os.kill(child.process_id, signal.SIGTERM)
        assert await child.wait() == 0
    finally:
        await child.stop(5)


async def test_a_scheduler_that_expires_no_lease_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(*_: object) -> None:
        raise ArithmeticError("a lease is broken")

    monkeypatch.setattr(Registry, "expire_forever", fails)
    with pytest.raises(ArithmeticError, match="a lease is broken"):
        async with asyncio.timeout(PATIENCE_SECONDS), running(SchedulerConfig()) as server:
            await server.until_signal()
