"""The loop of a rank that follows the first of its TP group: no requests, and no blocks to decide on."""

from engine.batch import Backend, Batch, Launched, StepShape
from engine.protocol.messages import Release, Stop
from engine.rank.heartbeat import Heartbeat
from engine.rank.link import RankLink
from engine.step.agreement import Agreement


class FollowerLoop:
    """Launches what all ranks agree on, and sleeps while they are idle."""

    def __init__(self, link: RankLink, backend: Backend, agreement: Agreement, heartbeat: Heartbeat) -> None:
        self._link = link
        self._backend = backend
        self._agreement = agreement
        self._heartbeat = heartbeat
        self._steps = 0
        self._in_flight: Launched | None = None

    def run(self) -> bool:
        """Return when all ranks have stopped or the service is gone (False), or all are released (True)."""
        stopping = released = False
        while True:
            messages = self._link.receive(wait=not (stopping or self._agreement.due))
            self._heartbeat.note_work()
            released = released or any(isinstance(message, Release) for message in messages)
            stopping = stopping or released or any(isinstance(message, Stop) for message in messages)
            if self._link.closed:
                return False
            if stopping or self._agreement.due:
                shape = self._agreement.agree(StepShape(0, stopping=stopping))
                if shape.stopping:
                    return released
                if shape.tokens:
                    self._launch(shape)
            self._heartbeat.note_wait()

    def _launch(self, shape: StepShape) -> None:
        """Launch the step; the backend computes the first rank's batch in place of this empty one."""
        launched = self._backend.launch(Batch(self._steps, ()), shape)
        self._steps += 1
        launched.draw()
        before, self._in_flight = self._in_flight, launched
        if before is not None:
            before.collect()
