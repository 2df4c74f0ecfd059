"""A request's way through the engine, as spans of its trace."""

from mesh.observe import span
from mesh.tracing import TraceContext


class Stages:
    """One stage follows another, until the request ends. Outside traces it keeps nothing."""

    __slots__ = ("_stage", "context")

    def __init__(self, traceparent: str | None) -> None:
        self.context = TraceContext.parse(traceparent)
        self._stage: span | None = None

    def enter(self, name: str, **attributes: object) -> None:
        """End the stage before, and begin this one."""
        self.end()
        if self.context is not None:
            self._stage = span(name, **attributes).begin(self.context)

    def end(self) -> None:
        """The request has ended, or goes on as another stage."""
        stage, self._stage = self._stage, None
        if stage is not None:
            stage.end()
