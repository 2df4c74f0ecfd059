"""Places requests by whichever scheduler answers; if none does, from the last snapshot of their registry."""

import asyncio
from collections.abc import Callable, Sequence

from gateway.config import DispatchConfig
from gateway.links.scheduler_link import RECONNECT_SECONDS, SchedulerLink
from gateway.links.workers import WorkerDirectory
from mesh.cancellation import check_cancelled
from mesh.domain.placement import AttemptReport, Placement, PlacementQuery
from mesh.errors import DeadlineExceeded, MeshError, NoWorker, NoWorkerYet, Retry, SchedulerUnavailable
from mesh.rpc.channel import Channels

RETRY_AFTER_MS = 1000


class Schedulers:
    """A Placer. `run` must be running: it keeps `directory` up to date and sends reports.

    All schedulers are equal and know the same workers. The gateway follows one: it places requests, and `directory`
    holds its snapshots. If it does not answer, the gateway follows another at once and does not ask the silent one
    before it has sent a snapshot. So a silent scheduler costs one request `answer_seconds`, and the others nothing. If
    none is left, the last snapshot serves.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        channels: Channels,
        directory: WorkerDirectory,
        config: DispatchConfig,
        live_streams: Callable[[], dict[str, int]],
        on_change: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._directory = directory
        self._config = config
        self._live_streams = live_streams
        self._on_change = on_change
        self._clock = clock
        self._links = [SchedulerLink(each, channels, config.place_seconds, self._on_news) for each in endpoints]
        # The scheduler whose snapshots `directory` has; None while none sends any.
        self._followed: SchedulerLink | None = None

    @property
    def followed(self) -> str:
        """The address of the scheduler that is followed; the first one's while none is."""
        return (self._followed or self._links[0]).endpoint

    async def place(self, query: PlacementQuery) -> Placement:
        cause: MeshError | None = None
        links = self._to_ask()
        for number, link in enumerate(links):
            dispensable = number + 1 < len(links) or self._find_alone(query) is not None
            most = self._config.place_seconds
            try:
                return await link.place(query, min(self._config.answer_seconds, most) if dispensable else most)
            except MeshError as error:
                check_cancelled()
                cause = error
            if _unreachable(cause):
                link.note_silence(cause)
            elif not isinstance(cause, NoWorkerYet):
                raise cause
        return self._place_alone(query, cause or self._silence())

    def report(self, report: AttemptReport) -> None:
        """Send the report to every scheduler: only the one that placed the attempt uses it."""
        for link in self._links:
            link.report(report)

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for link in self._links:
                tasks.create_task(link.run())
            tasks.create_task(self._expire_forever())

    def _to_ask(self) -> list[SchedulerLink]:
        """The schedulers to ask, the followed one first: those that answer, or all if none does and the snapshot is too
        old.
        """
        answering = [link for link in self._links if link.silence is None]
        if not answering and not self._directory.valid(self._clock()):
            answering = self._links
        return sorted(answering, key=lambda link: link is not self._followed)

    def _silence(self) -> MeshError:
        return next(link.silence for link in self._links if link.silence is not None)

    def _on_news(self, link: SchedulerLink) -> None:
        """Follow the best scheduler that has an open stream of snapshots; take its snapshot if it is new."""
        now, before = self._clock(), self._followed
        watched = [each for each in self._links if each.snapshot is not None]
        self._followed = min(watched, key=self._preference, default=None)
        if self._followed is None:
            if before is not None:
                self._directory.end_watch(now)
            return
        if self._followed is not before:
            self._directory.begin_watch(now)
        if self._followed is not before or self._followed is link:
            snapshot = self._followed.snapshot
            assert snapshot is not None
            self._directory.update(snapshot.workers, snapshot.lease_seconds, now)
            self._on_change()

    def _preference(self, link: SchedulerLink) -> tuple[bool, int, bool]:
        """Sort key, best first: a scheduler that answers (a silent one is better than none), then the one that knows
        most workers, since one that just started knows few, then the one that is followed already.
        """
        known = 0 if link.snapshot is None else len(link.snapshot.workers)
        return link.silence is not None, -known, link is not self._followed

    def _place_alone(self, query: PlacementQuery, cause: MeshError) -> Placement:
        """Place from the last snapshot. Raises why that is impossible."""
        # The snapshot may have changed while a scheduler was asked.
        found = self._find_alone(query)
        if found is not None:
            return found
        if _unreachable(cause) and not self._directory.valid(self._clock()):
            endpoints = " or ".join(link.endpoint for link in self._links)
            raise SchedulerUnavailable(
                f"the scheduler at {endpoints} cannot be reached ({cause.message}): retry later",
                retry_after_ms=RETRY_AFTER_MS,
            ) from cause
        raise NoWorker(f"no worker serves {query.model!r} now: retry later", retry_after_ms=RETRY_AFTER_MS) from cause

    def _find_alone(self, query: PlacementQuery) -> Placement | None:
        """A placement by the last snapshot; None if it has no room for the request, or is too old."""
        if not self._directory.valid(self._clock()):
            return None
        found = self._directory.least_loaded(query.model, query.avoid, self._live_streams())
        return None if found is None else Placement(*found)

    async def _expire_forever(self) -> None:
        while True:
            await asyncio.sleep(RECONNECT_SECONDS)
            if self._directory.expire(self._clock()):
                self._on_change()


def _unreachable(error: MeshError) -> bool:
    """Whether the error means that the scheduler did not answer. NoWorker is an answer: it knows no worker."""
    return isinstance(error, DeadlineExceeded) or (error.retry is Retry.THIS_CALL and not isinstance(error, NoWorker))
