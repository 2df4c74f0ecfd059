"""Steps on their way through the backend, and what came of them."""

from collections.abc import Sequence

import msgspec

from engine.batch import Launched, Row, Sample, StepShape
from engine.pace.prompt_pace import NO_PROMPTS, PromptTokens
from engine.requests.request import Request
from engine.step.step_work import StepWork


class InFlightStep(msgspec.Struct, frozen=True):
    """A launched step, and what the engine needs to know of it when its samples come."""

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
    """A step whose samples have come."""

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
