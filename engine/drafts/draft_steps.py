"""Steps of a model that drafts."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from engine.backend import Launched
from engine.batch import Batch
from engine.config import EngineConfig
from engine.drafts.draft_pass import EagerPass
from engine.drafts.drafting import Drafter, DraftingStep
from engine.drafts.graphs import DraftGraphs
from engine.runner.capture import Capture
from engine.runner.launched_step import StepEvents
from engine.runner.micro_batches import MicroBatches
from engine.runner.prompt_logits import PendingPromptLogprobs, wanted
from engine.runner.sizes import capture_drafting
from engine.runner.steps import NoGraphs
from engine.step.shape import StepShape
from engine.step.two_batch import NEVER, TwoBatch


class DraftSteps:
    """See `engine.runner.steps.Steps`."""

    def __init__(self, drafter: Drafter, batches: MicroBatches, config: EngineConfig) -> None:
        self.batches = batches
        self._drafter = drafter
        self._config = config
        self.graphs: DraftGraphs | NoGraphs = NoGraphs()

    def shortened(self) -> "DraftSteps":
        drafter = replace(self._drafter, model=self._drafter.model.short())
        return DraftSteps(drafter, self.batches.uncaptured, self._config)

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], longest: int, capture: Capture, two_batch: TwoBatch = NEVER) -> None:
        model, state = self._drafter.model, self._drafter.state
        self.graphs = capture_drafting(model, state, self._config, sizes, longest, capture, two_batch)

    def launch(self, batch: Batch, shape: StepShape, events: StepEvents | None) -> Launched:
        rows, drafter = batch.rows, self._drafter
        if self.graphs.fit(shape):
            return DraftingStep(drafter, rows, self.graphs.run(rows, shape), None, events)
        on_layers = batch.on_layers if events is None else events.layer_hook
        layers = EagerPass(drafter.model, drafter.state, rows, shape, self.batches, on_layers)
        prompts = PendingPromptLogprobs(rows, layers.hidden, drafter.model.logits) if wanted(rows) else None
        return DraftingStep(drafter, rows, layers, on_layers, events, prompts)
