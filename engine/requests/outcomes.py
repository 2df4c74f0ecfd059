"""What becomes of requests: steps bring them tokens, and errors, cancels or last tokens end them."""

import logging
from collections.abc import Sequence

from engine.batch import Row, Sample
from engine.moves.transfers import Transfers
from engine.plan.schedule import RequestSchedule
from engine.protocol.messages import Output, Refusal
from engine.requests.report import Report
from engine.requests.request import Request
from engine.step.pipeline import StepPipeline
from engine.step.wakefulness import Wakefulness
from mesh.blocks import BLOCK_TOKENS
from mesh.domain.outputs import FinishReason
from mesh.errors import MeshError


def commit(request: Request, row: Row, sample: Sample) -> Output:
    """Give the request what its row drew, up to the token that ends it, if that is among them."""
    if not (request.has_first_token or request.is_pushed):
        request.stages.enter("engine.decode")
    position = len(request.progress.token_ids)
    count, finish = _wanted(request, sample.token_ids)
    logprobs = None if sample.logprobs is None else [*sample.logprobs[:count]]
    output = Output(request.key, position, [*sample.token_ids[:count]], logprobs, None, finish)
    output.relaxed = sample.relaxed > 0
    if position == request.prompt_tokens:
        output.cached_tokens, output.store_cached_tokens = request.cached_tokens, request.store_cached_tokens
        output.host_cached_tokens = request.host_cached_tokens
        output.drafts_end = request.progress.drafts_end
        if request.prompt_scores is not None:
            output.prompt_logprobs = request.prompt_scores.whole()
            request.prompt_scores = None
    request.progress.committed(row.tokens, row.draws, output.token_ids, sample.drafts)
    if request.masks is not None and finish is None:
        request.masks.follow(output.token_ids, sample.drafts[: request.most_drafts])
    return output


def _wanted(request: Request, token_ids: Sequence[int]) -> tuple[int, FinishReason | None]:
    """How many of the next tokens the request takes, and how it ends with the last of them."""
    for count, token_id in enumerate(token_ids, start=1):
        if token_id in request.stop_token_ids:
            return count, FinishReason.STOP
    assert len(request.progress.token_ids) + len(token_ids) <= request.limit
    reached = len(request.progress.token_ids) + len(token_ids) == request.limit
    return len(token_ids), FinishReason.LENGTH if reached else None


def end_of(request: Request) -> Output | None:
    """The output, without tokens, of a request that has taken its last token; None if it goes on."""
    token_ids = request.progress.token_ids
    if token_ids[-1] in request.stop_token_ids:
        finish = FinishReason.STOP
    elif len(token_ids) == request.limit:
        finish = FinishReason.LENGTH
    else:
        return None
    return Output(request.key, len(token_ids), [], finish=finish)


def cancelled(request: Request) -> Output:
    return Output(request.key, len(request.progress.token_ids), [], finish=FinishReason.CANCELLED)


def refused(request: Request, error: MeshError) -> Output:
    return Output(request.key, len(request.progress.token_ids), [], refusal=Refusal(error.reason, error.message))


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
