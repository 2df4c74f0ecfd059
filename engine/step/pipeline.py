"""Steps on their way through the backend."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from engine.batch import Backend, Batch, Launched, Row, Sample, StepShape
from engine.pace.load import LoadMeter
from engine.pace.mixed_steps import MixedSteps
from engine.pace.prompt_pace import NO_PROMPTS
from engine.requests.request import Request
from engine.step.step_work import StepWork, prompt_tokens_of
from mesh.observe import span

LayerWatch = Callable[[Iterable[tuple[Request, int]]], Callable[[int], None] | None]


class InFlightStep(msgspec.Struct, frozen=True):
    """A launched step, and what the engine needs to know of it when its samples come."""

    work: StepWork
    requests: Sequence[Request]
    # One for each request.
    rows: Sequence[Row]
    launched: Launched
    # Seconds of the engine's clock.
    started: float
    # How many tokens were guessed behind each drawn token.
    drafts: int
    # Whether its tokens of prompts, if any, are computed as rows that decode.
    decode_only: bool
    # The most prompt tokens that any rank computes in chunks.
    prompt_tokens: int
    # Whether some rank decodes.
    decodes: bool


class StepPipeline:
    """Launches steps and collects them in order: with overlap one is in flight while the next is launched.

    Attributes:
        steps: how many were launched.
        in_flight: the step that was launched and is not due yet; only with overlap.
    """

    def __init__(
        self, backend: Backend, overlap: bool, clock: Callable[[], float], meter: LoadMeter, mixed_steps: MixedSteps
    ) -> None:
        self._backend = backend
        self._mixed_steps = mixed_steps
        self._overlap = overlap
        self._clock = clock
        self._meter = meter
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
        requests, rows = work.launch_rows()
        on_layers = layer_watch((request, row.end) for request, row in zip(requests, rows, strict=True))
        step, self.steps = self.steps, self.steps + 1
        started = self._clock()
        with span("engine.step", step=step, decoding=len(work.decoding), prompts=len(work.chunks)):
            launched = self._backend.launch(Batch(step, rows, on_layers), shape)
            if any(row.masks is not None and row.follows is not None for row in rows):
                self._undrawn = launched
            else:
                launched.draw()
        prompt_tokens = _prompt_tokens(work, rows, shape)
        self._mixed_steps.launched(prompt_tokens, shape.decodes)
        return InFlightStep(
            work=work,
            requests=requests,
            rows=rows,
            launched=launched,
            started=started,
            drafts=shape.drafts,
            decode_only=shape.decode_only,
            prompt_tokens=prompt_tokens,
            decodes=shape.decodes,
        )

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

    def collect(self, step: InFlightStep) -> Iterator[tuple[Request, Row, Sample | None]]:
        """Wait for the step; give what each row brought to its request. Scores of a prompt are added to its request."""
        with span("engine.collect"):
            samples = step.launched.collect()
        now = self._clock()
        # A step launched ahead began when the one before it ended.
        seconds = now - max(step.started, self._collected_at)
        accepted = sum(len(sample.token_ids) - 1 for sample in samples if sample is not None) if step.drafts else 0
        decoding = len(step.work.decoding)
        prompts, beside = NO_PROMPTS, 0
        if decoding and step.decode_only:
            # The step took as long as one with that many more requests. It does not show how fast prompts are computed.
            beside = step.work.prompt_tokens
        elif step.work.chunks:
            prompts = prompt_tokens_of(step.requests[decoding:], step.rows[decoding:])
        self._meter.observe_step(seconds, decoding, prompts, accepted, beside, self._is_quiet(step))
        row_tokens = step.work.prompt_tokens if step.decode_only else 0
        self._mixed_steps.observe(seconds, step.prompt_tokens, step.decodes, row_tokens)
        self._collected_at = now
        if step.work.scores_prompts:
            for index, part in step.launched.prompt_logprobs().items():
                scores = step.requests[index].prompt_scores
                assert scores is not None, "a prompt is scored until its first token"
                scores.add(step.rows[index].start, part)
        return zip(step.requests, step.rows, samples, strict=True)

    def _is_quiet(self, step: InFlightStep) -> bool:
        """Whether the step took as long as requests that decode take alone.

        It seems longer if the next step computes prompts: the host launches that one first, and sees this one's end
        late.
        """
        return not step.prompt_tokens and (self.in_flight is None or not self.in_flight.prompt_tokens)


def _prompt_tokens(work: StepWork, rows: Sequence[Row], shape: StepShape) -> int:
    """The most prompt tokens that any rank computes in chunks, if each decodes as many tokens as this one."""
    if shape.decode_only:
        return 0
    decoded = sum(row.tokens for row in rows[: len(work.decoding)])
    return max(shape.tokens - decoded, 1)
