"""The gateway's side of placement: what says where an attempt goes, and is told how it ended."""

from typing import Protocol

from mesh.domain.placement import AttemptReport, Placement, PlacementQuery


class Placer(Protocol):
    async def place(self, query: PlacementQuery) -> Placement:
        """Raises UnknownModel, NoWorker, NamespaceMismatch, Overloaded, ContextExceeded or SchedulerUnavailable."""
        ...

    def report(self, report: AttemptReport) -> None:
        """Report how an attempt ended; never waits."""
        ...
