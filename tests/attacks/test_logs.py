"""Whatever happens to the place where lines go, processes are read and go on."""

import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from launcher.log_lines import LinePrinter
from launcher.plan import ServiceSpec
from launcher.process import Child
from launcher.restart import RestartPolicy
from launcher.supervisor import Supervisor
from mesh.rpc.channel import Channels
from tests.support.forking import forked_services
from tests.support.waiting import eventually

# More than a pipe and a terminal hold.
CHATTY = "for number in range(3_000): print(number, 'x' * 100, flush=True)"


def full_disk() -> tuple[int, int | None]:
    """A file to write to, and the other end if there is one."""
    return os.open("/dev/full", os.O_WRONLY), None


def pipe_without_reader() -> tuple[int, int | None]:
    reading, file = os.pipe()
    os.close(reading)
    return file, None


def pipe_that_is_not_read() -> tuple[int, int | None]:
    reading, file = os.pipe()
    return file, reading


def terminal_that_is_gone() -> tuple[int, int | None]:
    controlling, file = os.openpty()
    os.close(controlling)
    return file, None


def terminal_that_is_not_read() -> tuple[int, int | None]:
    controlling, file = os.openpty()
    return file, controlling


SINKS = [full_disk, pipe_without_reader, pipe_that_is_not_read, terminal_that_is_gone, terminal_that_is_not_read]


@contextmanager
def printing_to(sink: Callable[[], tuple[int, int | None]]) -> Iterator[LinePrinter]:
    file, other_end = sink()
    with os.fdopen(file, "w", encoding="ascii") as output, LinePrinter(5, output) as printer:
        try:
            yield printer
        finally:
            if other_end is not None:
                os.close(other_end)


@pytest.mark.parametrize("sink", SINKS)
async def test_a_chatty_process_is_read_to_its_end(sink: Callable[[], tuple[int, int | None]]) -> None:
    with printing_to(sink) as printer:
        child = Child("probe", [sys.executable, "-c", CHATTY], printer)
        await child.start()
        assert await child.wait() == 0
        assert child.tail[-1].startswith("2999 ")


async def test_a_process_that_dies_is_restarted_though_nothing_is_printed() -> None:
    spec = ServiceSpec("probe", "tests.support.probe_service", None, (), 30.0)
    with printing_to(full_disk) as printer, forked_services():
        supervisor = Supervisor([spec], printer, Channels(), RestartPolicy(first_delay_seconds=0.05))
        keeping: asyncio.Task[None] | None = None
        try:
            await supervisor.start()
            first = supervisor.process_ids["probe"]
            keeping = asyncio.create_task(supervisor.until_failure())
            psutil.Process(first).kill()
            await eventually(lambda: keeping.done() or supervisor.process_ids["probe"] != first)
            assert not keeping.done()
        finally:
            await supervisor.stop()
            if keeping is not None:
                await asyncio.gather(keeping, return_exceptions=True)
