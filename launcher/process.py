"""Child processes that do not outlive their parent, whose output is read line by line, and that stop in order."""

import asyncio
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import BinaryIO

from grpc_health.v1 import health_pb2, health_pb2_grpc

from mesh.errors import MeshError, ProcessFailed
from mesh.processes.exit_status import describe_status
from mesh.processes.tethered import start_tethered
from mesh.rpc.channel import Channels

_TAIL_LINES = 20
_LONGEST_LINE = 64 * 1024
_POLL_SECONDS = 0.05


class Child:
    """One process in its own session, so that a terminal's Ctrl-C reaches only its parent.

    The kernel kills it when the parent dies; processes that it started are killed when it ends. `on_line` gets every
    line of its stdout and stderr, without the newline. Start it from the main thread: for the kernel, the parent is the
    thread that forked.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        on_line: Callable[[str, str], None],
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._command = command
        self._on_line = on_line
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._ended: asyncio.Task[int] | None = None

    @property
    def started(self) -> bool:
        """Whether the system has created the process."""
        return self._process is not None

    @property
    def process_id(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start the process and return at once; see `wait_ready`."""
        assert self._process is None
        # We create the pipe ourselves: with asyncio's, `wait` would not return until every process that inherited it
        # has closed it.
        read_end, write_end = os.pipe()
        try:
            self._process = await start_tethered(
                self._command,
                stdout=write_end,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
                env=None if self._environment is None else {**os.environ, **self._environment},
            )
        finally:
            os.close(write_end)
        self._ended = asyncio.create_task(self._read_until_ended(self._process, os.fdopen(read_end, "rb")))

    async def wait(self) -> int:
        """The exit status, once the process has ended and its output was read. A negative status is a signal's
        number.
        """
        assert self._ended is not None
        return await asyncio.shield(self._ended)

    @property
    def last_words(self) -> str:
        """ ": " and the last line that the process wrote; empty if it wrote none."""
        return ": " + self.tail[-1] if self.tail else ""

    async def wait_ready(self, endpoint: str, channels: Channels, timeout_seconds: float | None = None) -> None:
        """Return once gRPC health at `endpoint` says that `readiness` is SERVING.

        Raises ProcessFailed, with the last line that the process wrote, if it ends first or is not ready in time.
        """
        assert self._ended is not None
        ready = asyncio.create_task(until_ready(endpoint, channels))
        try:
            await asyncio.wait({ready, self._ended}, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                raise ProcessFailed(f"{self.name} ended with {describe_status(self._ended.result())}{self.last_words}")
            if not ready.done():
                raise ProcessFailed(f"{self.name} was not ready after {timeout_seconds:g} s{self.last_words}")
        finally:
            ready.cancel()

    async def stop(self, grace_seconds: float) -> None:
        """Send SIGTERM, then SIGKILL after the grace. Returns once the process and its children have ended. May be
        called twice.
        """
        if self._process is None or self._ended is None:
            return
        if self._ended.done():
            return
        with suppress(ProcessLookupError):
            self._process.terminate()
        await asyncio.wait({self._ended}, timeout=grace_seconds)
        if not self._ended.done():
            self._kill_session()
        await self._ended

    async def _read_until_ended(self, process: asyncio.subprocess.Process, output: BinaryIO) -> int:
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, output)
        lines = asyncio.create_task(self._read_lines(reader))
        try:
            status = await process.wait()
            # Processes that it started may keep the pipe open, and must not outlive it.
            self._kill_session()
            await lines
            return status
        finally:
            transport.close()

    async def _read_lines(self, stream: asyncio.StreamReader) -> None:
        rest = b""
        while chunk := await stream.read(_LONGEST_LINE):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) >= _LONGEST_LINE:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._pass_on(line)
        if rest:
            self._pass_on(rest)

    def _pass_on(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip("\r")
        self.tail.append(text)
        self._on_line(self.name, text)

    def _kill_session(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process_id, signal.SIGKILL)


async def until_ready(endpoint: str, channels: Channels) -> None:
    """Return once the server at `endpoint` answers that it is ready; waits for ever."""
    channel = channels.open(endpoint)
    try:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="readiness")
        while True:
            with suppress(MeshError):
                response = await health.Check(request, timeout=1.0)
                if response.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            await asyncio.sleep(_POLL_SECONDS)
    finally:
        await channel.close()
