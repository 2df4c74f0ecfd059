"""A worker's reports to the scheduler: the product's own, sent as often as a worker sends them."""

from collections.abc import Callable, Sequence
from functools import partial

from engine.protocol.messages import StepResult
from mesh.domain.workers import RankStatus, WorkerIdentity
from mesh.errors import LeaseExpired
from scheduler.live_worker import Lease
from scheduler.registry import Registry
from sim.timeline import Timeline
from worker.status_link import HEARTBEATS_A_LEASE
from worker.status_report import Report, StatusReport

# Takes the rank's quiet steps that have ended by now. The argument says whether a step that ends at this very moment
# counts as ended. Returns when the next one ends; None if that is not known.
CatchUp = Callable[[bool], float | None]


class StatusReporter:
    """Reports each change at once, but at most every `interval_seconds`, and at least three times a lease.

    If `hints` is off, reports name no blocks. A report takes `way_seconds` to reach the scheduler.
    """

    def __init__(
        self,
        timeline: Timeline,
        registry: Registry,
        identity: WorkerIdentity,
        interval_seconds: float,
        hints: bool,
        way_seconds: float,
        catch_up: CatchUp,
        ranks: Sequence[RankStatus],
    ) -> None:
        """ranks: each rank's first status if the worker has several; otherwise empty."""
        self._timeline = timeline
        self._registry = registry
        self._identity = identity
        self._interval_seconds = interval_seconds
        self._hints = hints
        self._way_seconds = way_seconds
        self._report = StatusReport(identity.total_blocks, ranks)
        self._lease = registry.attach(identity)
        self._alive = True
        self._catch_up = catch_up
        # When the next report is sent; None while nothing has changed.
        self._due_at: float | None = None
        # Whether that report waits for a step that ends at `_due_at`, rather than for the interval alone.
        self._awaits_end = False
        self._sent_at = float("-inf")
        self._send(snapshot=True)
        self._beat()

    def observe(self, result: StepResult, rank: int, ranks: Sequence[RankStatus]) -> None:
        """Note the result of a rank's step. ranks: each rank's status if the worker has several; otherwise empty."""
        blocks = (result.stored_blocks, result.removed_blocks) if self._hints else ([], [])
        host_blocks = (result.hosted_blocks, result.unhosted_blocks) if self._hints else ([], [])
        self._report.observe(result.load, *blocks, result.transfers, rank, ranks, *host_blocks)
        self._send_soon()

    def expect(self, seconds: float) -> None:
        """Report at `seconds`, when a step ends whose result the rank gives only once it is asked to catch up."""
        interval_over = self._sent_at + self._interval_seconds
        self._send_at(max(seconds, interval_over), awaits_end=seconds >= interval_over)

    def drain(self) -> None:
        self._report.drain()
        self._send_soon()

    def set_stalled(self, stalled: bool) -> None:
        self._report.set_stalled(stalled)
        self._send_soon()

    def leave(self) -> None:
        """Send the last report, which ends the lease."""
        self._report.leave()
        self._send(snapshot=False)

    def stop(self) -> None:
        """The process has ended: send nothing more."""
        self._alive = False
        self._registry.detach(self._lease)

    def _send_soon(self) -> None:
        self._send_at(max(self._timeline.now, self._sent_at + self._interval_seconds))

    def _send_at(self, seconds: float, awaits_end: bool = False) -> None:
        if self._due_at is None or seconds < self._due_at:
            self._due_at, self._awaits_end = seconds, awaits_end
            self._timeline.at(seconds, partial(self._send_due, seconds))

    def _send_due(self, seconds: float) -> None:
        if seconds == self._due_at:
            self._send(snapshot=False)

    def _beat(self) -> None:
        if self._alive:
            self._timeline.after(self._registry.lease_seconds / HEARTBEATS_A_LEASE, self._beat)
            self._send_soon()

    def _send(self, snapshot: bool) -> None:
        if not self._alive:
            return
        changes_next = self._catch_up(self._awaits_end)
        self._due_at, self._sent_at = None, self._timeline.now
        if changes_next is not None:
            self.expect(changes_next)
        report = self._report.next_report(snapshot)
        if report.leaving:
            self._alive = False
        self._timeline.soon(self._way_seconds, partial(self._arrive, self._lease, report))

    def _arrive(self, lease: Lease, report: Report) -> None:
        try:
            self._registry.update(lease, report.state, report.load, report.transfers, report.ranks)
            if report.stored or report.removed or report.snapshot:
                self._registry.record_blocks(lease, report.snapshot, report.stored, report.removed, report.holders)
            if report.leaving:
                self._registry.leave(lease)
        except LeaseExpired:
            # A worker whose lease ran out, perhaps because it was frozen for long, opens another stream.
            if self._alive and lease is self._lease:
                self._lease = self._registry.attach(self._identity)
                self._send(snapshot=True)
