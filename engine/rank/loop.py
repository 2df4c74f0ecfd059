"""The loops of a rank: messages in, steps, results out. One that follows the first of its TP group has no requests."""

from engine.backend import Backend, Launched
from engine.batch import Batch
from engine.engine import Engine
from engine.protocol.messages import Cancel, FirstToken, Found, Release, Start, Stop, Submit, ToRank
from engine.rank.heartbeat import Heartbeat
from engine.rank.link import RankLink
from engine.step.agreement import Agreement
from engine.step.shape import StepShape

# How often the rank looks at the counters of open transfers while nothing else happens.
LOOK_SECONDS = 0.25
# The same while blocks are read from host memory: the end of a copy is no event either.
READ_LOOK_SECONDS = 0.001


class RankLoop:
    """Steps while there is work, and sleeps while there is none."""

    def __init__(self, link: RankLink, engine: Engine, heartbeat: Heartbeat) -> None:
        self._link = link
        self._engine = engine
        self._heartbeat = heartbeat
        self._released = False

    def run(self) -> bool:
        """Return when the service has stopped this rank or closed the socket (False), or has released it (True)."""
        while not self._engine.stopped:
            messages = self._link.receive(wait=not self._engine.has_work(), most_seconds=self._most_seconds)
            self._heartbeat.note_work()
            for message in messages:
                self._handle(message)
            self._engine.poll_transfers()
            if self._link.closed:
                return False
            if self._engine.has_work() and (result := self._engine.step(self._send_news)) is not None:
                self._link.send(result)
            self._send_news()
            self._heartbeat.note_wait()
        return self._released

    @property
    def _most_seconds(self) -> float | None:
        """How long the rank may sleep if nothing wakes it."""
        transfers = self._engine.transfers
        if transfers.open_reads:
            return READ_LOOK_SECONDS
        # After its last event a transfer may still change the counters, and no event wakes the rank for that.
        return None if transfers.settled else LOOK_SECONDS

    def _send_news(self) -> None:
        for news in self._engine.transfers.drain_news():
            self._link.send(news)

    def _handle(self, message: ToRank) -> None:
        match message:
            case Submit():
                self._engine.submit(message)
            case Cancel():
                self._engine.cancel(message)
            case FirstToken():
                self._engine.first_token(message)
            case Stop() | Release():
                self._released = isinstance(message, Release)
                self._engine.stop()
            case _:
                assert not isinstance(message, Start | Found)
                self._engine.transfers.handle(message)


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
