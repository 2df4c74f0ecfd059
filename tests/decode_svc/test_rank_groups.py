"""A decode worker of two ranks: one worker to its gateways, its prefill workers and its stores."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager

import pytest

from decode_svc.prefill_link import PrefillLink
from engine.protocol.messages import FirstToken, LandingOpened
from mesh.channel import Channels
from mesh.domain.requests import Submission
from mesh.domain.targets import WorkerTarget
from mesh.domain.workers import WorkerState
from mesh.errors import EngineFailed
from tests.support.decode_server import AnyTarget, RunningWorker, gateway_client, running_worker
from tests.support.prefilling import running_prefill
from tests.support.waiting import eventually
from worker import rank_group
from worker.rank_group import RankGroup


def prompt_of(length: int, seed: int) -> list[int]:
    return [(seed * 31 + number * number) % 1000 for number in range(length)]


def ranks_that_computed(running: RunningWorker) -> list[int]:
    """Ranks whose pool holds blocks of prompts."""
    return [rank for rank, view in enumerate(running.worker.host.ranks.views) if view.chains.newest(1)]


async def test_two_ranks_serve_a_gateway_with_exact_tokens() -> None:
    async with running_worker(ranks=2) as running, gateway_client(running.endpoint) as gateway:
        streams = [await gateway.submit(prompt_of(100 + seed, seed), 40) for seed in range(24)]
        for stream_id in streams:
            assert (await gateway.ended(stream_id)).is_exact()
        assert ranks_that_computed(running) == [0, 1]


async def test_a_conversation_goes_on_where_its_prefix_is() -> None:
    async with running_worker(ranks=2) as running, gateway_client(running.endpoint) as gateway:
        prompts = [prompt_of(640, seed) for seed in range(6)]
        for stream_id in [await gateway.submit(prompt, 5) for prompt in prompts]:
            await gateway.ended(stream_id)
        for prompt in prompts:
            again = await gateway.ended(await gateway.submit([*prompt, 7], 5))
            assert (again.cached_tokens, again.is_exact()) == (640, True)


async def test_one_killed_rank_ends_the_worker_and_every_request_is_told_why() -> None:
    async with running_worker(ranks=2, engine={"oracle": {"step_ms": 5}}) as running:
        clients = running.worker.host.ranks.ranks
        async with gateway_client(running.endpoint) as gateway:
            streams = [await gateway.submit(prompt_of(50, seed), 400) for seed in range(4)]
            await gateway.until(lambda: all(gateway.requests[stream_id].tokens for stream_id in streams))
            os.kill(clients[1].process_id, signal.SIGKILL)
            async with asyncio.timeout(1.0):
                ended = [await gateway.ended(stream_id) for stream_id in streams]
                await asyncio.gather(*(asyncio.shield(client.closed) for client in clients))
        for request in ended:
            assert isinstance(request.error, EngineFailed)
            assert request.error.message == "rank 1 of 2 ended with status -9"
        assert running.worker.host.report.next_report(snapshot=True).state is WorkerState.DRAINING


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_tp_group_that_loses_a_rank_while_prompts_land_tells_every_request(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "END_SECONDS", 1.0)
    engine = {"parallel": {"tp": 2}, "transfer": {}}
    async with (
        running_worker(engine=engine) as running,
        running_prefill(engine={"oracle": {"prefill_tokens_per_second": 300}}) as prefill,
        gateway_client(running.endpoint) as gateway,
    ):
        ranks = running.worker.host.ranks
        streams = [await gateway.submit(prompt_of(300, seed), 20, prefill=prefill.target) for seed in range(3)]
        await eventually(lambda: ranks.transfers.open_landings > 0)
        os.kill(ranks.processes[1].process_id, number)
        errors = [(await gateway.ended(stream_id)).error for stream_id in streams]
        assert [type(error) for error in errors] == [EngineFailed] * 3
        assert len({str(error) for error in errors}) == 1 and "rank 1 of 2" in str(errors[0])
        await asyncio.gather(*(asyncio.shield(process.closed) for process in ranks.processes))


async def test_a_frozen_rank_is_reported_and_then_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "STALLED_SECONDS", 0.5)
    monkeypatch.setattr(rank_group, "END_SECONDS", 1.5)
    async with (
        running_worker(engine={"oracle": {"step_ms": 5}}) as running,
        gateway_client(running.endpoint) as gateway,
    ):
        (rank,) = running.worker.host.ranks.ranks
        stream_id = await gateway.submit(prompt_of(50, 1), 400)
        await gateway.until(lambda: bool(gateway.requests[stream_id].tokens))
        os.kill(rank.process_id, signal.SIGSTOP)
        report = running.worker.host.report
        await eventually(lambda: report.next_report(snapshot=False).state is WorkerState.STALLED)
        request = await gateway.ended(stream_id)
        assert isinstance(request.error, EngineFailed)
        assert request.error.message == "the engine process has made no progress for 1.5 s: its process does not run"
        await asyncio.wait_for(asyncio.shield(rank.closed), 2.0)


class RecordingLink(PrefillLink):
    """Keeps the landings that prefill workers are told of."""

    def __init__(self) -> None:
        super().__init__(Channels(), AnyTarget())
        self.opened: list[LandingOpened] = []

    def call(
        self, target: WorkerTarget, submission: Submission, opened: LandingOpened
    ) -> AsyncGenerator[FirstToken, None]:
        self.opened.append(opened)
        return super().call(target, submission, opened)


@contextmanager
def frozen(ranks: RankGroup) -> Iterator[None]:
    """The ranks' processes do not run in this block."""
    for rank in ranks.ranks:
        os.kill(rank.process_id, signal.SIGSTOP)
    try:
        yield
    finally:
        for rank in ranks.ranks:
            os.kill(rank.process_id, signal.SIGCONT)


@pytest.mark.parametrize("prefill_ranks", [1, 2])
async def test_prefill_ranks_push_to_the_decode_rank_that_the_ticket_names(
    prefill_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_group, "END_SECONDS", 60)
    link = RecordingLink()
    async with (
        running_worker(ranks=2, prefill_link=link, engine={"transfer": {}}) as running,
        running_prefill(ranks=prefill_ranks) as prefill,
        gateway_client(running.endpoint) as gateway,
    ):
        # No prompt ends before the last is given to a rank: so each rank has the least work once.
        with frozen(prefill.worker.host.ranks):
            streams = [await gateway.submit(prompt_of(300, seed), 20, prefill=prefill.target) for seed in range(6)]
            await eventually(lambda: prefill.worker.live_requests == 6)
        for stream_id in streams:
            assert (await gateway.ended(stream_id)).is_exact()
        ranks = running.worker.host.ranks
        await eventually(lambda: all(view.transfers.sent_bytes for view in prefill.worker.host.ranks.views))
        await eventually(lambda: received_bytes(ranks) == landed_bytes(ranks, link.opened))
    assert {ranks.rank_of(opened.key) for opened in link.opened} == {0, 1}
    for opened in link.opened:
        rank = ranks.rank_of(opened.key)
        places = {(segment.destination_rank, segment.worker_address) for segment in opened.ticket.segments}
        assert places == {(rank, ranks.ranks[rank].ready.transfer_address)}


def received_bytes(ranks: RankGroup) -> list[int]:
    """What each rank says that it received."""
    return [sum(view.transfers.received_bytes.values()) for view in ranks.views]


def landed_bytes(ranks: RankGroup, landings: Sequence[LandingOpened]) -> list[int]:
    """What each rank's landings hold."""
    landed = [0] * len(ranks.ranks)
    for opened in landings:
        landed[ranks.rank_of(opened.key)] += opened.ticket.size_bytes
    return landed
