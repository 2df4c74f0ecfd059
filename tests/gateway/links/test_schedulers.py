"""Several schedulers: whichever answers is used."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.config import DispatchConfig
from tests.support.fake_decode import FakeDecodeWorker, oracle_tokens
from tests.support.fake_scheduler import FakeScheduler
from tests.support.gateways import Mesh, collect, ids_request, running_mesh
from tests.support.waiting import eventually

ANSWER = oracle_tokens([5, 6, 7], 8)


# Where no test waits for them to pass, and where one that hangs costs as many: long enough for one that answers.
PATIENT_SECONDS, WAITED_SECONDS = 30.0, 2.0


@asynccontextmanager
async def two_schedulers(answer_seconds: float = PATIENT_SECONDS) -> AsyncIterator[tuple[Mesh, FakeScheduler]]:
    """A mesh whose gateway follows the first; the second knows the same worker."""
    second, worker = FakeScheduler(), FakeDecodeWorker()
    async with (
        second.server() as server,
        running_mesh(
            worker, more_schedulers=(server.port,), dispatch=DispatchConfig(answer_seconds=answer_seconds)
        ) as mesh,
    ):
        second.add(worker.identity())
        await collect(mesh, ids_request())
        yield mesh, second


async def test_one_is_asked_and_the_other_is_not() -> None:
    async with two_schedulers() as (mesh, second):
        assert (await collect(mesh, ids_request())).token_ids == ANSWER
        assert (len(mesh.scheduler.queries), len(second.queries)) == (2, 0)


async def test_when_one_is_killed_the_other_places_every_request() -> None:
    async with two_schedulers() as (mesh, second):
        await mesh.scheduler_server.__aexit__(None, None, None)
        for _ in range(5):
            assert (await collect(mesh, ids_request())).token_ids == ANSWER
        assert len(second.queries) == 5


async def test_one_that_hangs_costs_one_request_its_deadline() -> None:
    async with two_schedulers(WAITED_SECONDS) as (mesh, second):
        mesh.scheduler.answer_seconds = 60.0
        for _ in range(10):
            assert (await collect(mesh, ids_request())).token_ids == ANSWER
        # The one that waited for it, and the one before it hung.
        assert (len(mesh.scheduler.queries), len(second.queries)) == (2, 10)


async def test_new_workers_are_known_while_one_hangs() -> None:
    async with two_schedulers(WAITED_SECONDS) as (mesh, second):
        mesh.scheduler.answer_seconds = 60.0
        await collect(mesh, ids_request())
        second.add(FakeDecodeWorker(worker_id="decode-1").identity())
        await eventually(lambda: set(mesh.gateway.directory.incarnations()) == {"decode-0", "decode-1"})
        second.remove("decode-1")
        await eventually(lambda: set(mesh.gateway.directory.incarnations()) == {"decode-0"})


async def test_outcomes_are_reported_to_the_one_that_placed() -> None:
    async with two_schedulers() as (mesh, second):
        await mesh.scheduler_server.__aexit__(None, None, None)
        await collect(mesh, ids_request())
        await eventually(lambda: len(second.outcomes) == 2)
