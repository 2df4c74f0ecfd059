"""Collects the metrics of all processes of a gateway; the first one serves them."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LABEL = "process"
# How long a process may take to send its metrics; if it takes longer they are left out.
ANSWER_SECONDS = 2.0
# Size of the length that precedes a process's text.
LENGTH_BYTES = 8


class Siblings:
    """`async with Siblings(directory, process, processes) as siblings:` serves this process's metrics to the others
    through a socket in their common directory.
    """

    def __init__(self, directory: Path, process: int, processes: int) -> None:
        self._directory = directory
        self._process = process
        self._processes = processes

    async def __aenter__(self) -> Self:
        path = self._path(self._process)
        # An earlier process with this number may have left its socket.
        path.unlink(missing_ok=True)
        self._server = await asyncio.start_unix_server(_tell, path)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()

    async def metrics(self) -> bytes:
        """The metrics of all processes that answer, in Prometheus' text format. A label of each series names its
        process.
        """
        others = [number for number in range(self._processes) if number != self._process]
        told = await asyncio.gather(*map(self._ask, others))
        own = await asyncio.to_thread(generate_latest)
        texts = {self._process: own, **dict(zip(others, told, strict=True))}
        return await asyncio.to_thread(together, texts)

    async def _ask(self, number: int) -> bytes:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                reader, writer = await asyncio.open_unix_connection(self._path(number))
                try:
                    return await reader.readexactly(int.from_bytes(await reader.readexactly(LENGTH_BYTES)))
                finally:
                    writer.close()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            # The process ended, perhaps in the middle of its answer.
            return b""

    def _path(self, number: int) -> Path:
        return self._directory / str(number)


def together(texts: dict[int, bytes]) -> bytes:
    """The texts of several processes, merged into one."""
    registry = CollectorRegistry()
    registry.register(_Labelled(texts))
    return generate_latest(registry)


class _Labelled(Collector):
    def __init__(self, texts: dict[int, bytes]) -> None:
        self._texts = texts

    def describe(self) -> Sequence[Metric]:
        # Empty, because the registry would otherwise collect everything to learn the names.
        return ()

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for number, text in sorted(self._texts.items()):
            for family in text_string_to_metric_families(text.decode()):
                whole = Metric(family.name, family.documentation, family.type)
                _extend(families.setdefault(family.name, whole), family, number)
        yield from families.values()


def _extend(family: Metric, by: Metric, number: int) -> None:
    for sample in by.samples:
        family.add_sample(sample.name, {**sample.labels, LABEL: str(number)}, sample.value)


async def _tell(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        text = await asyncio.to_thread(generate_latest)
        writer.write(len(text).to_bytes(LENGTH_BYTES) + text)
        await writer.drain()
    except ConnectionError:
        # The process that asked did not wait for the answer.
        pass
    finally:
        writer.close()
