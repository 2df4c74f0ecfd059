"""Steps of a model that does not draft."""

from collections.abc import Sequence

import torch

from engine.backend import Launched
from engine.batch import Batch, Row
from engine.model.context import DeviceState
from engine.model.inputs import build_context, last_tokens
from engine.model.model import Model, OnLayers
from engine.runner import step_parts
from engine.runner.capture import Capture
from engine.runner.graphs import DecodeGraphs
from engine.runner.launched_step import LaunchedStep, StepEvents
from engine.runner.micro_batches import MicroBatches
from engine.runner.prompt_logits import PendingPromptLogprobs, wanted
from engine.runner.sampler import Sampler
from engine.runner.sizes import capture_decoding
from engine.runner.steps import NoGraphs
from engine.step.shape import StepShape
from engine.step.two_batch import NEVER, TwoBatch
from kernels.host_copy import to_indices


class PlainSteps:
    """See `engine.runner.steps.Steps`."""

    def __init__(self, model: Model, state: DeviceState, sampler: Sampler, batches: MicroBatches) -> None:
        self.batches = batches
        self._model = model
        self._state = state
        self._sampler = sampler
        self.graphs: DecodeGraphs | NoGraphs = NoGraphs()

    def shortened(self) -> "PlainSteps":
        return PlainSteps(self._model.short(), self._state, self._sampler, self.batches.uncaptured)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], longest: int, capture: Capture, two_batch: TwoBatch = NEVER) -> None:
        self.graphs = capture_decoding(self._model, self._state, sizes, longest, capture, two_batch)

    def launch(self, batch: Batch, shape: StepShape, events: StepEvents | None) -> Launched:
        rows, likeliest, prompts = batch.rows, None, None
        drawing = [index for index, row in enumerate(rows) if row.sampling is not None]
        if self.graphs.fit(shape):
            logits, likeliest = self.graphs.run(rows, shape)
            if len(drawing) < len(rows):
                logits, likeliest = logits[to_indices(drawing, self._state.device)], None
        else:
            logits, prompts = self._logits(rows, shape, batch.on_layers if events is None else events.layer_hook)
        return LaunchedStep(rows, drawing, logits, self._state, self._sampler, events, prompts, likeliest)

    def _logits(
        self, rows: Sequence[Row], shape: StepShape, on_layers: OnLayers | None
    ) -> tuple[torch.Tensor, PendingPromptLogprobs | None]:
        """The logits of rows that draw, [rows, vocabulary], and what rows report of their prompts."""
        model = self._model
        parts = self.batches.of(rows, shape)
        contexts = [part.context(build_context(model.config, part.rows, self._state, part.size)) for part in parts]
        if not wanted(rows) and parts[0].spread is None and self.batches.captured(contexts) is None:
            return step_parts.logits(model, contexts, on_layers), None
        hidden = self.batches.hidden_states(model, parts, contexts, on_layers)
        prompts = PendingPromptLogprobs(rows, hidden, model.logits) if wanted(rows) else None
        return model.logits(hidden[to_indices(last_tokens(rows), self._state.device)]), prompts
