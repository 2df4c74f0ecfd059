"""Whether the rank steps or sleeps."""

from collections.abc import Sized

from engine.moves.transfers import Transfers
from engine.requests.intake import Intake
from engine.requests.report import Report
from engine.step.agreement import Agreement
from engine.step.pipeline import StepPipeline


class Wakefulness:
    """Knows whether a step now would do or report anything, before another message or event of the agent arrives.

    That is so while

        a request needs nothing from elsewhere, unless the engine is blocked   `requests`
        a grammar is compiled, so that its request can be queued               `intake.ready`
        a step is in flight, so that it has to be collected                    `pipeline.in_flight`
        outputs, the load or counters are to be reported                       `report.pending`
        another rank waits for this one's proposal                             `agreement.due`
        this rank is to stop, and the others have to agree                     `stopping`

    The engine is blocked once a step could do nothing. Who calls `changed` ends that:

        Engine._enqueue         a request was queued
        Engine.first_token      a request has the token that it waited for
        Engine.poll_transfers   KV has come, or a transfer gave back blocks
        Outcomes                a request ended, and gave back its place and blocks

    A step that computes nothing because prompts are held back does not block: they go on after some more steps. Nor
    does one that read what it admitted from host memory at once.
    """

    def __init__(
        self,
        requests: Sized,
        intake: Intake,
        transfers: Transfers,
        pipeline: StepPipeline,
        report: Report,
        agreement: Agreement,
    ) -> None:
        """requests: all that have not ended."""
        self._requests = requests
        self._intake = intake
        self._transfers = transfers
        self._pipeline = pipeline
        self._report = report
        self._agreement = agreement
        self.blocked = False
        self.stopping = False

    def changed(self) -> None:
        self.blocked = False

    def stepped(self, moved: bool, held_back: bool) -> None:
        """moved: whether the step launched or collected any row. held_back: see Proposal."""
        self.blocked = not (moved or held_back or self._transfers.can_resume)
        may_wait = self._transfers.open or self._transfers.awaited or self._intake.compiling or self.stopping
        assert not self.blocked or may_wait or not self._requests, "work that no step takes on"

    @property
    def has_work(self) -> bool:
        can_go_on = len(self._requests) > self._transfers.awaited + self._intake.compiling and not self.blocked
        own = can_go_on or self._intake.ready or self._pipeline.in_flight or self._report.pending or self.stopping
        return bool(own or self._agreement.due)
