"""The ranks that a service owns on behalf of its worker's first host; only that host's service talks to them."""

import asyncio
import os
from collections.abc import Coroutine, Iterable, Mapping
from contextlib import suppress
from typing import Any, Protocol, Self

from engine.protocol.frames import RECEIVE_BYTES, FrameDecoder, FrameEncoder
from engine.protocol.messages import FromRank, Release, Released
from engine.protocol.pulse import LoopProgress
from mesh.errors import EngineFailed
from mesh.processes.exit_status import describe_status
from worker.config import WorkerConfig
from worker.hosts.host_group import LEAVE_SECONDS, HostGroup
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
    """Made by `start`. `run` has the ranks load and carries what they say; `write`, `kill` and `record` carry out the
    first host's messages. If that host is lost, `keep` keeps what the ranks have loaded for the next `run`.
    """

    def __init__(self, ranks: Mapping[int, RankProcess], group: HostGroup) -> None:
        """ranks: by their numbers in the worker with all of its hosts."""
        self._ranks = ranks
        self._group = group
        self._decoders: dict[int, FrameDecoder[FromRank]] = {}
        # Done once a rank has ended, with its exit status.
        self._closed: dict[int, asyncio.Future[int]] = {}
        # Ranks that have left their group.
        self._released: set[int] = set()

    @classmethod
    async def start(cls, config: WorkerConfig, host: int) -> Self:
        """Start the ranks of host `host`. config: must have the whole layout."""
        parallel = config.engine.parallel
        group, descriptors = await HostGroup.open(parallel.ranks_a_host)
        ranks: dict[int, RankProcess] = {}
        owner = cls(ranks, group)
        try:
            for number in range(host * parallel.ranks_a_host, (host + 1) * parallel.ranks_a_host):
                ranks[number] = await start_rank(config.rank_engine, number, descriptors)
                owner._decoders[number] = FrameDecoder(FromRank)
                owner._closed[number] = asyncio.ensure_future(ranks[number].process.wait())
        except BaseException:
            await owner.close()
            raise
        finally:
            descriptors.close()
        return owner

    def write(self, rank: int, data: bytes) -> None:
        writer = self._rank(rank).writer
        # A rank that has ended is reported by itself.
        if not writer.is_closing():
            writer.write(data)

    def kill(self, rank: int) -> None:
        with suppress(ProcessLookupError):
            self._rank(rank).process.kill()

    def record(self, record: bytes) -> None:
        self._group.line.write(record)

    async def run(self, first: FirstHost, config: WorkerConfig, place: int) -> None:
        """Return once all ranks have stopped. Raises EngineFailed once one has ended otherwise.

        config: with the layout on the hosts with which the worker forms, and an id; place: this host's among them.
        """
        assert config.worker_id is not None
        authorship = config.authorship(config.worker_id)
        for rank, number in enumerate(self._ranks, start=place * config.engine.parallel.ranks_a_host):
            start = start_message(config.rank_engine, config.observe, rank, authorship)
            self.write(number, bytes(FrameEncoder().encode(start)))
        watching = [
            asyncio.create_task(self._group.line.run(first.record)),
            asyncio.create_task(self._tell_progress(first)),
        ]
        try:
            await _all(self._carry(number, first) for number in self._ranks)
        finally:
            for task in watching:
                task.cancel()

    async def keep(self) -> None:
        """Have all ranks leave their group, and forget all but what they have loaded. Raises EngineFailed if one has
        ended, or takes too long.
        """
        self._group.line.end()
        for number in self._ranks:
            self.write(number, bytes(FrameEncoder().encode(Release())))
        leaving = (self._until_released(number) for number in self._ranks)
        try:
            async with asyncio.timeout(LEAVE_SECONDS):
                await _all([self._group.line.run(_drop), *leaving])
        except TimeoutError as error:
            raise EngineFailed(f"a rank has not left its group within {LEAVE_SECONDS:g} s") from error
        self._group.renew()
        self._released.clear()

    async def close(self) -> None:
        """End the ranks that are left."""
        for number in self._ranks:
            self.kill(number)
        for number, rank in self._ranks.items():
            await asyncio.shield(self._closed[number])
            rank.writer.close()
            os.close(rank.pulse_descriptor)
        self._group.close()

    async def _carry(self, number: int, first: FirstHost) -> None:
        while data := await self._read(number):
            await first.data(number, data)
        if number in self._released:
            # The first host will soon notice which host was lost.
            await asyncio.get_running_loop().create_future()
        status = await asyncio.shield(self._closed[number])
        await first.ended(number, status)
        if status:
            raise EngineFailed(f"rank {number} ended with {describe_status(status)}, and with it this host")

    async def _until_released(self, number: int) -> None:
        while await self._read(number):
            pass
        if number not in self._released:
            status = await asyncio.shield(self._closed[number])
            raise EngineFailed(f"rank {number} ended with {describe_status(status)}")

    async def _read(self, number: int) -> bytes:
        """What the rank says next; nothing once it has ended or left its group."""
        if number in self._released:
            return b""
        data = b""
        # If a killed rank had unread input, its connection is reset rather than closed.
        with suppress(ConnectionError):
            data = await self._ranks[number].reader.read(RECEIVE_BYTES)
        if any(isinstance(message, Released) for message in self._decoders[number].feed(data)):
            self._released.add(number)
            return b""
        return data

    async def _tell_progress(self, first: FirstHost) -> None:
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            await first.progress({number: rank.pulse.read() for number, rank in self._ranks.items()})

    def _rank(self, number: int) -> RankProcess:
        if number not in self._ranks:
            raise EngineFailed(f"the worker's first host speaks to rank {number}, which does not lie here")
        return self._ranks[number]


async def _all(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run the calls until they end, or until one raises, which cancels the others."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _drop(record: bytes) -> None:
    """No host waits for it any more."""
