"""A mesh whose processes' lines go to a file."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from launcher.log_lines import LinePrinter
from launcher.plan import ServiceSpec
from launcher.supervisor import Supervisor
from mesh.rpc.channel import Channels


@asynccontextmanager
async def logged_mesh(
    specs: Sequence[ServiceSpec], log: Path, channels: Channels, *, append: bool = False
) -> AsyncIterator[Supervisor]:
    """Start these processes, and stop them when the block ends.

    Raises ProcessFailed if one does not get ready, OSError if `log` cannot be opened.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("a" if append else "w", encoding="utf-8") as output,
        LinePrinter(max(len(spec.name) for spec in specs), output) as printer,
    ):
        supervisor = Supervisor(specs, printer, channels)
        try:
            await supervisor.start()
            yield supervisor
        finally:
            await supervisor.stop()
