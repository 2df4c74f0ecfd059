"""Launches steps and collects them in order."""

from collections.abc import Callable, Iterable, Sequence

import msgspec

from engine.backend import Backend, Launched
from engine.batch import Batch, Row, Sample
from engine.pace.step_meter import NO_PROMPTS, PromptTokens
from engine.requests.request import Request
from engine.step.shape import StepShape
from engine.step.step_work import StepWork
from mesh.observe.spans import span


class InFlightStep(msgspec.Struct, frozen=True):
    """A launched step, and what the engine needs when it collects it."""

    work: StepWork
    # What the worker's ranks agreed on.
    shape: StepShape
    requests: Sequence[Request]
    # One for each request.
    rows: Sequence[Row]
    launched: Launched
    # Seconds of the engine's clock.
    started: float

    @property
    def chunk_tokens(self) -> int:
        """The most prompt tokens that any rank computes in chunks, if each decodes as many tokens as this one."""
        if self.shape.decode_only:
            return 0
        decoded = sum(row.tokens for row in self.rows[: len(self.work.decoding)])
        return max(self.shape.tokens - decoded, 1)

    @property
    def prompts(self) -> PromptTokens:
        """The prompt tokens that this rank computes."""
        tokens, decoding = NO_PROMPTS, len(self.work.decoding)
        for request, row in zip(self.requests[decoding:], self.rows[decoding:], strict=True):
            tokens = tokens.with_chunk(row.start, row.end, request.sparse_from)
        return tokens


class CollectedStep(msgspec.Struct, frozen=True):
    """A step whose samples are there."""

    step: InFlightStep
    # One for each row; None where the row draws nothing.
    samples: Sequence[Sample | None]
    # How long the step took.
    seconds: float

    @property
    def accepted_drafts(self) -> int:
        if not self.step.shape.drafts:
            return 0
        return sum(len(sample.token_ids) - 1 for sample in self.samples if sample is not None)


LayerWatch = Callable[[Iterable[tuple[Request, int]]], Callable[[int], None] | None]


class StepPipeline:
    """Launches steps and collects them in order: with overlap one is in flight while the next is launched.

    Attributes:
        steps: how many were launched.
        in_flight: the step that was launched and is not due yet; only with overlap.
    """

    def __init__(self, backend: Backend, overlap: bool, clock: Callable[[], float]) -> None:
        self._backend = backend
        self._overlap = overlap
        self._clock = clock
        self.steps = 0
        self.in_flight: InFlightStep | None = None
        # A step that is launched and whose tokens are drawn only once the step before it is collected.
        self._undrawn: Launched | None = None
        self._collected_at = 0.0

    @property
    def rows_in_flight(self) -> bool:
        """Whether a step with rows is not due yet: if so, some requests' last tokens are not known."""
        return self.in_flight is not None and bool(self.in_flight.work)

    def launch(self, work: StepWork, shape: StepShape, layer_watch: LayerWatch) -> InFlightStep | None:
        """Begin the step that was agreed on: a dummy if this rank has no work; None if no rank has any.

        layer_watch: see `Transfers.layer_watch`.
        """
        if not shape.tokens:
            return None
        requests, rows = work.batch_rows()
        masks_wait = False
        for index, (request, row) in enumerate(zip(requests, rows, strict=True)):
            request.progress.launched(row.tokens, row.draws, index, work.depth)
            if row.masks is not None and row.follows is not None:
                masks_wait = True
        on_layers = layer_watch((request, row.end) for request, row in zip(requests, rows, strict=True))
        step, self.steps = self.steps, self.steps + 1
        started = self._clock()
        with span("engine.step", step=step, decoding=len(work.decoding), prompts=len(work.chunks)):
            launched = self._backend.launch(Batch(step, rows, on_layers), shape)
            if masks_wait:
                self._undrawn = launched
            else:
                launched.draw()
        return InFlightStep(work, shape, requests, rows, launched, started)

    def due(self, launched: InFlightStep | None) -> InFlightStep | None:
        """The step to collect now: the one just launched, or with overlap the one before it."""
        if not self._overlap:
            return launched
        due, self.in_flight = self.in_flight, launched
        return due

    def draw_rest(self) -> None:
        """Draw a step that waited for the tokens of the step before it, since its masks depend on them."""
        undrawn, self._undrawn = self._undrawn, None
        if undrawn is not None:
            with span("engine.draw"):
                undrawn.draw()

    def collect(self, step: InFlightStep) -> CollectedStep:
        """Wait for the step. Scores of a prompt are added to its request."""
        with span("engine.collect"):
            samples = step.launched.collect()
        now = self._clock()
        # A step launched ahead began when the one before it ended.
        seconds = now - max(step.started, self._collected_at)
        self._collected_at = now
        if step.work.scores_prompts:
            for index, part in step.launched.prompt_logprobs().items():
                scores = step.requests[index].prompt_scores
                assert scores is not None, "a prompt is scored until its first token"
                scores.add(step.rows[index].start, part)
        return CollectedStep(step, samples, seconds)
