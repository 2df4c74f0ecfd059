"""A step without drafts on its way: its logits, then the tokens drawn from them."""

from collections.abc import Mapping, Sequence

import torch

from engine.batch import Row, Sample
from engine.model.context import DeviceState
from engine.runner.prompt_logits import PendingPromptLogprobs
from engine.runner.sampler import PendingSamples, Sampler
from engine.runner.step_events import StepEvents
from kernels.host_copy import to_indices
from mesh.domain.outputs import PromptLogprobs


class LaunchedStep:
    """An `engine.batch.Launched` of a step without drafts."""

    def __init__(
        self,
        rows: Sequence[Row],
        drawing: Sequence[int],
        logits: torch.Tensor,
        state: DeviceState,
        sampler: Sampler,
        events: StepEvents | None,
        prompts: PendingPromptLogprobs | None = None,
    ) -> None:
        """drawing: the rows that draw; logits: [drawing, vocabulary]; events: None on a CPU, whose step is done;
        prompts: None if no row reports any.
        """
        self._rows = len(rows)
        self._drawing = drawing
        self._drawn_rows = [rows[index] for index in drawing]
        self._logits: torch.Tensor | None = logits
        self._state = state
        self._sampler = sampler
        self._events = events
        self._prompts = prompts
        self._pending: PendingSamples | None = None

    @torch.inference_mode()
    def draw(self) -> None:
        """Queue the draw, whose tokens the next step's rows may follow."""
        logits, self._logits = self._logits, None
        assert logits is not None, "a step draws once"
        if self._drawing:
            token_ids = self._sampler.draw(logits, self._drawn_rows, self._state.drawn)
            drawing = to_indices(self._drawing, self._state.device)
            self._state.drawn[drawing] = token_ids
            self._pending = PendingSamples(logits, token_ids, self._drawn_rows)
        if self._events is not None:
            self._events.enqueued()

    def collect(self) -> list[Sample | None]:
        assert self._logits is None, "a step is collected after its draw"
        if self._events is not None:
            # KV that was not written yet must not be pushed, nor its blocks be given to others.
            self._events.synchronize()
        samples: list[Sample | None] = [None] * self._rows
        if self._pending is not None:
            for index, sample in zip(self._drawing, self._pending.read(), strict=True):
                samples[index] = sample
        return samples

    def prompt_logprobs(self) -> Mapping[int, PromptLogprobs]:
        return {} if self._prompts is None else self._prompts.read()
