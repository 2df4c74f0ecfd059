"""The ranks that a service owns on behalf of its worker's first host; only that host's service talks to them."""

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol, Self

from engine.parallel.peers import GroupDescriptors
from engine.protocol.frames import RECEIVE_BYTES, FrameEncoder
from engine.protocol.pulse import LoopProgress
from mesh.errors import EngineFailed
from worker.config import WorkerConfig
from worker.hosts.line import Line
from worker.ranks.process import RankProcess, start_message, start_rank

# How often the first host gets the ranks' progress.
PROGRESS_SECONDS = 0.1


class FirstHost(Protocol):
    """The way to the first host, in order. Each call waits while the first host does not read."""

    async def data(self, rank: int, data: bytes) -> None: ...

    async def ended(self, rank: int, status: int) -> None: ...

    async def progress(self, ranks: Mapping[int, LoopProgress]) -> None: ...

    async def record(self, record: bytes) -> None: ...


class HostRanks:
    """Made by `start`. `run` carries what ranks say; `write`, `kill` and `record` carry out the first host's
    messages.
    """

    def __init__(self, ranks: Mapping[int, RankProcess], line: Line, first: FirstHost) -> None:
        self._ranks = ranks
        self._line = line
        self._first = first

    @classmethod
    async def start(cls, config: WorkerConfig, host: int, first: FirstHost) -> Self:
        """Start the ranks of host `host`. config: must have the whole layout and an id."""
        parallel = config.engine.parallel
        line, descriptor = await Line.open()
        group = GroupDescriptors.create(parallel.ranks_a_host, descriptor)
        ranks: dict[int, RankProcess] = {}
        owner = cls(ranks, line, first)
        try:
            for number in range(host * parallel.ranks_a_host, (host + 1) * parallel.ranks_a_host):
                ranks[number] = await start_rank(config.rank_engine, number, group)
                assert config.worker_id is not None
                start = start_message(config.rank_engine, config.observe, number, config.authorship(config.worker_id))
                ranks[number].writer.write(bytes(FrameEncoder().encode(start)))
        except BaseException:
            await owner.close()
            raise
        finally:
            group.close()
        return owner

    def write(self, rank: int, data: bytes) -> None:
        self._rank(rank).writer.write(data)

    def kill(self, rank: int) -> None:
        with suppress(ProcessLookupError):
            self._rank(rank).process.kill()

    def record(self, record: bytes) -> None:
        self._line.write(record)

    async def run(self) -> None:
        """Return once all ranks have stopped. If one ended otherwise, raises EngineFailed once all have ended."""
        watching = [asyncio.create_task(self._line.run(self._first.record)), asyncio.create_task(self._tell_progress())]
        try:
            statuses = await asyncio.gather(*(self._carry(number, rank) for number, rank in self._ranks.items()))
        finally:
            for task in watching:
                task.cancel()
        for number, status in zip(self._ranks, statuses, strict=True):
            if status:
                raise EngineFailed(f"rank {number} ended with status {status}, and with it the worker")

    async def close(self) -> None:
        """End the ranks that are left."""
        for number in self._ranks:
            self.kill(number)
        for rank in self._ranks.values():
            await rank.process.wait()
            rank.writer.close()
            os.close(rank.pulse_descriptor)
        self._line.close()

    async def _carry(self, number: int, rank: RankProcess) -> int:
        # If a killed rank had unread input, its connection is reset rather than closed.
        with suppress(ConnectionError):
            while data := await rank.reader.read(RECEIVE_BYTES):
                await self._first.data(number, data)
        status = await rank.process.wait()
        await self._first.ended(number, status)
        return status

    async def _tell_progress(self) -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            await self._first.progress({number: rank.pulse.read() for number, rank in self._ranks.items()})

    def _rank(self, number: int) -> RankProcess:
        if number not in self._ranks:
            raise EngineFailed(f"the worker's first host speaks to rank {number}, which does not lie here")
        return self._ranks[number]
