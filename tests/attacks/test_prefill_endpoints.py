"""A submission cannot make a decode worker connect to any host, nor hand a prompt to whoever listens there."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from deepmesh.internal.v1 import decode_pb2, targets_pb2, workers_pb2

from decode_svc import registered
from decode_svc.prefill_link import PrefillLink
from decode_svc.registered import RegisteredPrefills
from decode_svc.registry_link import RegistryLink
from mesh.errors import PrefillLost
from mesh.rpc.channel import Channels
from tests.support.decode_server import decode_without_rank, gateway_client
from tests.support.fake_prefill import fake_prefill
from tests.support.fake_scheduler import FakeScheduler
from tests.support.prefilling import make_ticket
from tests.support.scheduler_server import identity_message
from tests.support.waiting import eventually

PROMPT = [number % 100 for number in range(150)]


@asynccontextmanager
async def watching(scheduler: FakeScheduler) -> AsyncIterator[PrefillLink]:
    prefills = RegisteredPrefills(time.monotonic)
    async with scheduler.server() as server:
        task = asyncio.create_task(RegistryLink(server.endpoint, Channels(), prefills).run())
        try:
            yield PrefillLink(Channels(), prefills)
        finally:
            task.cancel()


@pytest.mark.parametrize("known", [True, False])
async def test_a_prompt_goes_to_registered_prefill_workers_alone(known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not known:
        monkeypatch.setattr(registered, "NEWS_SECONDS", 0.05)
    scheduler = FakeScheduler()
    async with (
        fake_prefill() as prefill,
        watching(scheduler) as link,
        decode_without_rank(prefill_link=link) as running,
        gateway_client(running.endpoint) as gateway,
    ):
        if known:
            role = workers_pb2.WORKER_ROLE_PREFILL
            scheduler.add(identity_message("prefill-1", role=role, endpoint=prefill.endpoint))
        target = targets_pb2.WorkerTarget(worker_id="prefill-1", incarnation="first", endpoint=prefill.endpoint)
        await gateway.submit(PROMPT, 10, prefill=target)
        rank = running.rank
        assert rank is not None
        await eventually(lambda: 0 in rank.submitted)
        rank.open_landing(0, make_ticket(len(PROMPT)))
        if known:
            await prefill.call()
            await gateway.send(cancellation=decode_pb2.Cancellation(stream_id=1))
        else:
            assert isinstance((await gateway.ended(1)).error, PrefillLost)
            assert not prefill.calls
            assert not link.open_channels
