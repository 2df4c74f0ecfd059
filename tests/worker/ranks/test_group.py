"""Several ranks as one worker has them."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import psutil
import pytest

from engine.oracle.tokens import oracle_tokens
from engine.parallel.config import ParallelConfig
from engine.protocol.messages import FirstToken, Output, StepResult
from mesh.blocks import chain_hashes
from mesh.domain.outputs import FinishReason
from mesh.domain.workers import WorkerLoad
from mesh.errors import ConfigError, EngineFailed
from tests.support.engines import VOCABULARY, Transcript, oracle_config, prompt_of, submit_of
from tests.support.fake_rank import FakeRankClient
from tests.support.forking import forked_services
from tests.support.waiting import eventually
from transfer.config import TransferConfig
from worker.ranks import group as rank_group
from worker.ranks.group import RankGroup, RankMessage

LOAD = WorkerLoad(free_blocks=90)


@dataclass
class Group:
    ranks: RankGroup
    clients: list[FakeRankClient]
    received: list[tuple[int, RankMessage]]
    running: "asyncio.Task[EngineFailed]"

    def submit(self, token_ids: Sequence[int], computes_prompt: bool = True) -> int:
        key = self.ranks.new_key(token_ids, b"", computes_prompt)
        self.ranks.submit(submit_of(key, list(token_ids), 5, remote_prefill=not computes_prompt))
        return key

    async def emit(self, rank: int, *messages: StepResult) -> None:
        count = len(self.received) + len(messages)
        self.clients[rank].emit(*messages)
        await eventually(lambda: len(self.received) == count)


@asynccontextmanager
async def grouped(ranks: int = 2) -> AsyncIterator[Group]:
    clients = [FakeRankClient() for _ in range(ranks)]
    received: list[tuple[int, RankMessage]] = []
    group = RankGroup(clients)  # type: ignore[arg-type]
    running = asyncio.create_task(group.run(lambda rank, message: received.append((rank, message))))
    yield Group(group, clients, received, running)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def step(*outputs: Output, stored: Sequence[bytes] = (), load: WorkerLoad = LOAD) -> StepResult:
    parents = [b"", *stored[:-1]] if stored else []
    return StepResult(1, list(outputs), load, list(stored), parents)


def children() -> set[psutil.Process]:
    return set(psutil.Process().children())


async def test_requests_spread_over_idle_ranks() -> None:
    async with grouped(3) as group:
        keys = [group.submit(prompt_of(100, seed)) for seed in range(6)]
        assert len(set(keys)) == 6
        assert [sorted(client.submitted) for client in group.clients] == [
            sorted(key for key in keys if group.ranks.rank_of(key) == rank) for rank in range(3)
        ]
        assert [len(client.submitted) for client in group.clients] == [2, 2, 2]


async def test_messages_about_a_request_go_to_its_rank() -> None:
    async with grouped() as group:
        first, second = group.submit([1] * 100, computes_prompt=False), group.submit([2] * 100)
        group.ranks.first_token(FirstToken(first, 7))
        group.ranks.cancel(second)
        one, other = group.clients[group.ranks.rank_of(first)], group.clients[group.ranks.rank_of(second)]
        assert one is not other
        assert (one.first_tokens, one.cancelled) == ([FirstToken(first, 7)], [])
        assert (other.first_tokens, other.cancelled) == ([], [second])


async def test_a_request_goes_to_the_rank_that_holds_its_prefix() -> None:
    prompt = prompt_of(640)
    async with grouped() as group:
        await group.emit(1, step(stored=chain_hashes(prompt)))
        assert group.ranks.rank_of(group.submit(prompt)) == 1
        assert group.ranks.rank_of(group.submit(prompt_of(640, seed=9))) == 0


async def test_a_request_follows_its_placement_to_a_good_rank() -> None:
    async with grouped(3) as group:
        for booked, expected in ((2, 2), (2, 0), (7, 1)):
            key = group.ranks.new_key([1] * 100, b"", computes_prompt=True, booked=booked)
            group.ranks.submit(submit_of(key, [1] * 100, 5))
            assert group.ranks.rank_of(key) == expected


async def test_prompts_weigh_until_computed_requests_until_they_end() -> None:
    async with grouped() as group:
        long, short = group.submit([1] * 900), group.submit([2] * 10)
        assert group.ranks.rank_of(group.submit([3] * 10)) == group.ranks.rank_of(short)
        await group.emit(group.ranks.rank_of(long), step(Output(long, 900, [5], cached_tokens=0)))
        assert group.ranks.rank_of(group.submit([4] * 10)) == group.ranks.rank_of(long)
        await group.emit(group.ranks.rank_of(long), step(Output(long, 901, [5], finish=FinishReason.STOP)))
        assert group.ranks.rank_of(group.submit([5] * 10)) == group.ranks.rank_of(long)


async def test_loads_are_known_by_rank_and_together() -> None:
    async with grouped() as group:
        assert group.ranks.load.free_blocks == 200
        await group.emit(1, step(load=WorkerLoad(running_requests=2, free_blocks=60)))
        assert [view.load.free_blocks for view in group.ranks.views] == [100, 60]
        assert (group.ranks.load.running_requests, group.ranks.load.free_blocks) == (2, 160)


async def test_messages_of_a_rank_keep_their_order() -> None:
    async with grouped() as group:
        first, second = step(load=WorkerLoad(1)), step(load=WorkerLoad(2))
        await group.emit(0, first, second)
        assert group.received == [(0, first), (0, second)]


async def test_the_end_of_one_rank_ends_the_others() -> None:
    async with grouped(3) as group:
        group.clients[1].die()
        failure = await group.running
        assert failure.message == "the engine process ended with status 9"
        assert all(client.dead for client in group.clients)
        with pytest.raises(EngineFailed, match="status 9"):
            group.submit([1])


async def test_nothing_is_taken_from_ranks_after_one_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async with grouped() as group:

        async def settle(*_: object) -> None:
            group.clients[0].emit(step())
            await eventually(lambda: not group.clients[0].unread)

        monkeypatch.setattr(rank_group, "settle_loss", settle)
        group.clients[1].die()
        await group.running
        assert group.received == []


@asynccontextmanager
async def real_group(ranks: int) -> AsyncIterator[RankGroup]:
    config = oracle_config(total_blocks=200, max_requests=16, parallel=ParallelConfig(dp=ranks))
    with forked_services():
        group = await RankGroup.start(config)
    try:
        yield group
    finally:
        await group.close(grace_seconds=30.0)


async def test_two_ranks_serve_requests_with_exact_tokens() -> None:
    prompts = [prompt_of(length, seed=length) for length in range(1, 200, 9)]
    transcript, ranks = Transcript(), set[int]()
    async with real_group(2) as group:
        assert (group.ready.total_blocks, group.ready.max_requests) == (400, 32)

        def on_message(rank: int, message: RankMessage) -> None:
            assert isinstance(message, StepResult)
            assert {group.rank_of(output.key) for output in message.outputs} <= {rank}
            ranks.add(rank)
            transcript.record(message)

        running = asyncio.create_task(group.run(on_message))
        keys = []
        for prompt in prompts:
            keys.append(group.new_key(prompt, b"", computes_prompt=True))
            group.submit(submit_of(keys[-1], prompt, 50))
        await eventually(lambda: len(transcript.ends) == len(prompts))
        running.cancel()
    assert ranks == {0, 1}
    for key, prompt in zip(keys, prompts, strict=True):
        assert transcript.token_ids[key] == oracle_tokens(prompt, 50, VOCABULARY)


async def test_a_killed_rank_ends_the_others_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Its silence alone would not be noticed.
    monkeypatch.setattr(rank_group, "END_SECONDS", 1000.0)
    async with real_group(2) as group:
        running = asyncio.create_task(group.run(lambda rank, message: None))
        os.kill(group.ranks[1].process_id, signal.SIGKILL)
        failure = await running
        assert failure.message == "rank 1 of 2 ended with signal SIGKILL"
        await asyncio.shield(group.ranks[0].closed)


async def test_a_frozen_rank_is_stalled_until_it_is_thawed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "STALLED_SECONDS", 0.2)
    async with grouped() as group:
        group.clients[1].frozen = True
        await eventually(lambda: group.ranks.stalled)
        group.clients[1].frozen = False
        await eventually(lambda: not group.ranks.stalled)
        assert not group.running.done()


async def test_a_rank_that_stays_frozen_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_group, "END_SECONDS", 2.0)
    async with real_group(2) as group:
        running = asyncio.create_task(group.run(lambda rank, message: None))
        os.kill(group.ranks[1].process_id, signal.SIGSTOP)
        failure = await running
        assert failure.message == "rank 1 of 2 has made no progress for 2 s: its process does not run"
        await asyncio.gather(*(asyncio.shield(rank.closed) for rank in group.ranks))


async def test_a_long_step_of_a_rank_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    # A busy machine may keep a rank from its heartbeat for a second.
    monkeypatch.setattr(rank_group, "STALLED_SECONDS", 2.5)
    with forked_services():
        group = await RankGroup.start(oracle_config(oracle={"step_ms": 3000.0}))
    try:
        stalled = []
        running = asyncio.create_task(group.run(lambda rank, message: stalled.append(group.stalled)))
        group.submit(submit_of(group.new_key([1], b"", computes_prompt=True), [1], 1))
        await eventually(lambda: bool(stalled))
        assert stalled == [False]
        running.cancel()
    finally:
        await group.close(grace_seconds=30.0)


async def test_ranks_that_cannot_start_say_why_and_leave_no_process() -> None:
    before = children()
    with pytest.raises(ConfigError, match="UCX"):
        await RankGroup.start(
            oracle_config(transfer=TransferConfig(transports="nonsense"), parallel=ParallelConfig(dp=2))
        )
    await eventually(lambda: children() <= before)


async def test_a_start_that_is_given_up_leaves_no_process() -> None:
    before = children()
    starting = asyncio.create_task(RankGroup.start(oracle_config(parallel=ParallelConfig(dp=2))))
    await eventually(lambda: len(children() - before) == 2)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await eventually(lambda: children() <= before)
