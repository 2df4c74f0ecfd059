"""The line from a host's first rank to other hosts, at the service's end."""

import asyncio
import os
import socket

from engine.parallel.host_line import END, HEADER
from tests.support.waiting import eventually
from worker.hosts.host_group import HostGroup
from worker.hosts.host_ranks import HostRanks
from worker.hosts.line import Line

RECORD = HEADER.pack(0, 4) + b"ours"


async def test_a_run_that_is_cancelled_within_a_record_loses_nothing() -> None:
    line, descriptor = await Line.open()
    records: list[bytes] = []

    async def keep(record: bytes) -> None:
        records.append(record)

    with socket.socket(fileno=descriptor) as rank:
        rank.sendall(RECORD + RECORD[:7])
        running = asyncio.create_task(line.run(keep))
        await eventually(lambda: records == [RECORD])
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        rank.sendall(RECORD[7:] + END)
        await line.run(keep)
    assert records == [RECORD, RECORD]
    line.close()


async def test_another_program_goes_on_with_a_line_that_has_ended() -> None:
    line, descriptor = await Line.open()
    with socket.socket(fileno=descriptor) as rank:
        line.end()
        rank.sendall(END)
        await line.run(_never)
        left = line.leave()
        line.close()
        assert rank.recv(100) == END
        taken = await Line.take(left)
        taken.write(RECORD)
        await asyncio.sleep(0)
        assert rank.recv(100) == RECORD
        taken.close()


async def test_a_rank_that_has_left_is_not_waited_for_again() -> None:
    group, descriptors = await HostGroup.open(1)
    assert descriptors.line is not None
    with socket.socket(fileno=os.dup(descriptors.line)) as rank:
        # As when a rank of another host ends, which this one notices before its service does.
        rank.sendall(END)
        await group.line.run(_never)
        await HostRanks({}, group).keep()
        records: list[bytes] = []

        async def keep(record: bytes) -> None:
            records.append(record)

        rank.sendall(RECORD + END)
        await group.line.run(keep)
    assert records == [RECORD]
    group.close()
    descriptors.close()


async def _never(record: bytes) -> None:
    raise AssertionError(record)
