"""What becomes of requests: steps bring them tokens, and errors, cancels or last tokens end them."""

import logging

from engine.batch import Row, Sample
from engine.moves.transfers import Transfers
from engine.plan.schedule import RequestSchedule
from engine.requests.outputs import cancelled, commit, end_of, refused
from engine.requests.report import Report
from engine.requests.request import Request
from engine.step.pipeline import StepPipeline
from engine.step.wakefulness import Wakefulness
from mesh.blocks import BLOCK_TOKENS
from mesh.domain.outputs import FinishReason
from mesh.errors import MeshError

_log = logging.getLogger("deepmesh.engine")


class Outcomes:
    """Reports each request's outputs. One that ends gives back its place at once, and its blocks once no step in flight
    writes to them.
    """

    def __init__(
        self,
        requests: dict[int, Request],
        schedule: RequestSchedule,
        transfers: Transfers,
        report: Report,
        pipeline: StepPipeline,
        wakefulness: Wakefulness,
    ) -> None:
        """requests: by key, those that have not ended; they leave it here."""
        self._requests = requests
        self._schedule = schedule
        self._transfers = transfers
        self._report = report
        self._pipeline = pipeline
        self._wakefulness = wakefulness

    def commit(self, request: Request, row: Row, sample: Sample | None) -> None:
        """The request's earliest row in flight yielded this sample; None if it draws nothing."""
        progress = request.progress
        if request.ended:
            progress.committed(row.tokens, row.draws, ())
            self._release_ended(request)
            return
        failure = None
        if sample is not None and request.masks is not None:
            failure = request.masks.failure(len(sample.token_ids))
        if failure is not None:
            progress.committed(row.tokens, row.draws, ())
            self._schedule.withdraw(request)
            self.refuse(request, failure)
            return
        output = None
        if sample is None:
            progress.committed(row.tokens, 0, ())
        else:
            output = commit(request, row, sample)
            if request.most_drafts and row.decodes:
                self._report.add_drafts(row.drafts, sample)
            self._report.outputs.append(output)
        if progress.computed // BLOCK_TOKENS > progress.registered_blocks:
            self._schedule.register(request)
        if request.push is not None:
            self._transfers.on_computed(request, progress.computed)
        if output is not None and output.finish is not None:
            # Without drafts a request left the steps when the row of its last token was launched.
            if output.finish is FinishReason.STOP or request.most_drafts:
                self._schedule.withdraw(request)
            self._finish(request)

    def _finish(self, request: Request) -> None:
        """The request has its last token."""
        self._report.add_finished(len(request.progress.token_ids) - request.prompt_tokens)
        self._close(request)

    def end_if_done(self, request: Request) -> None:
        """End the request if it has its last token, which was reported before or is not to be."""
        if (output := end_of(request)) is not None:
            self._report.outputs.append(output)
            self._schedule.withdraw(request)
            self._finish(request)

    def cancel(self, request: Request) -> None:
        self._schedule.withdraw(request)
        self._report.outputs.append(cancelled(request))
        self._close(request)

    def refuse(self, request: Request, error: MeshError) -> None:
        self._report.outputs.append(refused(request, error))
        self._close(request)

    def _close(self, request: Request) -> None:
        if _log.isEnabledFor(logging.DEBUG):
            tokens, step = len(request.progress.token_ids), self._pipeline.steps
            fields = {"request_id": request.request_id, "tokens": tokens, "step": step}
            _log.debug("request ended", extra={"fields": fields})
        del self._requests[request.key]
        request.ended = True
        request.stages.end()
        self._wakefulness.changed()
        self._transfers.give_up(request)
        self._release_ended(request)

    def _release_ended(self, request: Request) -> None:
        if not request.progress.rows_in_flight:
            self._schedule.release(request)
