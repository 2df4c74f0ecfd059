"""A worker's reports to the scheduler: the product's own, sent as often as a worker sends them."""

from engine.protocol.messages import StepResult
from mesh.domain.workers import WorkerIdentity
from mesh.errors import LeaseExpired
from scheduler.registry import Registry
from sim.timeline import Timeline
from worker.status_link import HEARTBEATS_A_LEASE
from worker.status_report import StatusReport


class StatusReporter:
    """Reports at once, at most every `interval_seconds`, and at least three times a lease.

    With `hints` off the scheduler hears of no blocks. `alive` is False once the process has ended without a word.
    """

    def __init__(
        self, timeline: Timeline, registry: Registry, identity: WorkerIdentity, interval_seconds: float, hints: bool
    ) -> None:
        self._timeline = timeline
        self._registry = registry
        self._identity = identity
        self._interval_seconds = interval_seconds
        self._hints = hints
        self._report = StatusReport(identity.total_blocks)
        self._lease = registry.attach(identity)
        self._alive = True
        self._due = False
        self._sent_at = float("-inf")
        self._send(snapshot=True)
        self._beat()

    def observe(self, result: StepResult) -> None:
        stored, removed = (result.stored_blocks, result.removed_blocks) if self._hints else ([], [])
        self._report.observe(result.load, stored, removed, result.transfers)
        self._send_soon()

    def drain(self) -> None:
        self._report.drain()
        self._send_soon()

    def set_stalled(self, stalled: bool) -> None:
        self._report.set_stalled(stalled)
        self._send_soon()

    def leave(self) -> None:
        """The last report."""
        self._report.leave()
        self._send(snapshot=False)

    def stop(self) -> None:
        """The process is gone."""
        self._alive = False
        self._registry.detach(self._lease)

    def _send_soon(self) -> None:
        if not self._due:
            self._due = True
            self._timeline.at(self._sent_at + self._interval_seconds, lambda: self._send(snapshot=False))

    def _beat(self) -> None:
        if self._alive:
            self._timeline.after(self._registry.lease_seconds / HEARTBEATS_A_LEASE, self._beat)
            self._send_soon()

    def _send(self, snapshot: bool) -> None:
        if not self._alive:
            return
        self._due, self._sent_at = False, self._timeline.now
        report = self._report.next_report(snapshot)
        try:
            self._registry.update(self._lease, report.state, report.load, report.transfers)
        except LeaseExpired:
            # A worker whose lease ran out, frozen for long perhaps, opens another stream.
            self._lease = self._registry.attach(self._identity)
            self._send(snapshot=True)
            return
        if report.stored or report.removed or snapshot:
            self._registry.record_blocks(self._lease, report.snapshot, report.stored, report.removed)
        if report.leaving:
            self._alive = False
            self._registry.leave(self._lease)
