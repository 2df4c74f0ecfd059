"""Keeps the processes of a mesh running, and stops them in order."""

import asyncio
import os
import time
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from pathlib import Path

import mesh
from launcher.log_lines import NAME
from launcher.plan import ServiceSpec
from launcher.process import Child
from launcher.restart import RestartPolicy
from mesh.addresses import with_port
from mesh.errors import ProcessFailed
from mesh.ports import free_port
from mesh.processes.exit_status import describe_status
from mesh.rpc.channel import Channels

STOP_GRACE_SECONDS = 15.0
# Pause between two lines that name the services that are not ready yet.
WAITING_SECONDS = 10.0


class Supervisor:
    """`start` returns once every service is ready; `until_failure` then restarts services that die; `stop` ends them
    all.

    A service that cannot be kept running ends the mesh, unless it is optional, or a worker while another one serves.
    `on_line(name, line)` gets every line of every process, and the supervisor's own lines under the name "mesh".
    """

    def __init__(
        self,
        specs: Sequence[ServiceSpec],
        on_line: Callable[[str, str], None],
        channels: Channels,
        policy: RestartPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        waiting_seconds: float = WAITING_SECONDS,
    ) -> None:
        self._specs = specs
        self._on_line = on_line
        self._channels = channels
        self._policy = policy or RestartPolicy()
        self._clock = clock
        self._children: dict[str, Child] = {}
        self._ready: set[str] = set()
        self._waiting_seconds = waiting_seconds
        self._keepers: dict[asyncio.Task[None], ServiceSpec] = {}

    @property
    def process_ids(self) -> dict[str, int]:
        """Process ids of the services that were started, by name."""
        return {name: child.process_id for name, child in self._children.items() if child.started}

    async def start(self) -> None:
        """Start the first service, then all others together. Raises ProcessFailed if one does not become ready."""
        first, *others = self._specs
        waiting = asyncio.create_task(self._report_waiting())
        starts: list[asyncio.Task[None]] = []
        try:
            await self._start(first)
            starts = [asyncio.create_task(self._start(spec)) for spec in others]
            await asyncio.gather(*starts)
        finally:
            for each in (waiting, *starts):
                each.cancel()
            await asyncio.gather(waiting, *starts, return_exceptions=True)

    async def until_failure(self) -> None:
        """Restart services that die. Raises ProcessFailed once the mesh cannot continue."""
        self._keepers = {asyncio.create_task(self._keep(spec)): spec for spec in self._specs}
        running = set(self._keepers)
        while True:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            for keeper in done:
                failure = keeper.exception()
                assert failure is not None, "a service is kept until that fails"
                others = [self._keepers[other] for other in running]
                if not _dispensable(self._keepers[keeper], others):
                    raise failure
                self._on_line(NAME, f"{failure}: going on without it")

    async def restart(self, names: Collection[str]) -> None:
        """Stop these services and start them again, together. Do not call it while `until_failure` runs, which restarts
        them too.

        Raises ProcessFailed if one does not become ready.
        """
        assert not self._keepers
        await asyncio.gather(*(self._children[name].stop(STOP_GRACE_SECONDS) for name in names))
        await asyncio.gather(*(self._start(spec) for spec in self._specs if spec.name in names))

    async def stop(self) -> None:
        """Stop the services, last started first, those of one kind together."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for group in _stop_order(self._specs):
            children = [self._children[spec.name] for spec in group if spec.name in self._children]
            await asyncio.gather(*(child.stop(STOP_GRACE_SECONDS) for child in children))

    async def _report_waiting(self) -> None:
        """Every few seconds, name the services that are not ready yet, until cancelled."""
        began_at = self._clock()
        while True:
            await asyncio.sleep(self._waiting_seconds)
            names = [spec.name for spec in self._specs if spec.name in self._children and spec.name not in self._ready]
            self._on_line(NAME, f"waiting for {', '.join(names)} since {self._clock() - began_at:.0f} s")

    async def _start(self, spec: ServiceSpec) -> None:
        port = spec.port or free_port(spec.host)
        child = Child(spec.name, spec.command(port), self._on_line, {**_environment(), **spec.environment})
        self._children[spec.name] = child
        self._ready.discard(spec.name)
        await child.start()
        await child.wait_ready(with_port(spec.host, port), self._channels, spec.ready_seconds)
        self._ready.add(spec.name)

    async def _keep(self, spec: ServiceSpec) -> None:
        ends = 0
        while True:
            ready_at = self._clock()
            status = await self._children[spec.name].wait()
            ends = self._policy.ends_in_row(ends, self._clock() - ready_at)
            await self._restart(spec, ends, status)

    async def _restart(self, spec: ServiceSpec, ends: int, status: int) -> None:
        """Restart a service until it is ready. Raises ProcessFailed if the policy gives up."""
        while True:
            ended = f"{spec.name} ended with {describe_status(status)}"
            delay = self._policy.delay_seconds(ends)
            if delay is None:
                raise ProcessFailed(f"{ended} and is not started again{self._children[spec.name].last_words}")
            self._on_line(NAME, f"{ended}: starting it again in {delay:g} s")
            await asyncio.sleep(delay)
            try:
                return await self._start(spec)
            except ProcessFailed as error:
                self._on_line(NAME, error.message)
            await self._children[spec.name].stop(STOP_GRACE_SECONDS)
            status, ends = await self._children[spec.name].wait(), ends + 1


def _environment() -> dict[str, str]:
    ours = str(Path(mesh.__file__).parents[1])
    return {
        # Our path comes first: a service must not run other code than its supervisor.
        "PYTHONPATH": os.pathsep.join(filter(None, (ours, os.environ.get("PYTHONPATH")))),
        # Silences gRPC's own log lines, since services report the same errors themselves. gRPC reads it when imported.
        "GRPC_VERBOSITY": os.environ.get("GRPC_VERBOSITY", "NONE"),
    }


def _dispensable(spec: ServiceSpec, others: Sequence[ServiceSpec]) -> bool:
    return spec.optional or (spec.worker and any(other.worker and other.module == spec.module for other in others))


def _stop_order(specs: Sequence[ServiceSpec]) -> list[list[ServiceSpec]]:
    return [list(group) for _, group in groupby(reversed(specs), key=lambda spec: spec.module)]
