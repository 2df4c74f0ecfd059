"""Stand-ins for captured graphs on a CPU: what a graph would capture runs eagerly, over the same tensors."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import pytest
import torch

from engine.batch import Batch, Launched, StepShape
from engine.drafts import graphs as draft_graphs
from engine.drafts.graphs import DraftGraphs
from engine.model.context import ForwardContext
from engine.model.model import OnLayers
from engine.runner import graphs, prompt_graphs
from engine.runner.backend import ModelBackend
from engine.runner.graphs import DecodeGraphs
from engine.runner.pieces import Pieces
from engine.runner.prompt_graphs import PromptGraphs
from engine.step.two_batch import NEVER, TwoBatch
from mesh.blocks import blocks_for


def note_others(monkeypatch: pytest.MonkeyPatch, backend: ModelBackend, others: list[StepShape]) -> None:
    """Add to `others` the shapes of steps that no graph computes."""
    launch = backend.launch

    def noted(batch: Batch, shape: StepShape) -> Launched:
        if not backend._captures(shape):
            others.append(shape)
        return launch(batch, shape)

    monkeypatch.setattr(backend, "launch", noted)


class EagerPieces:
    """`engine.runner.pieces.Pieces` on a CPU."""

    runs = 0

    def __init__(self, work: Callable[[Pieces], None], pool: None) -> None:
        self._work = work

    def run(self, context: ForwardContext, on_layers: OnLayers | None) -> None:
        EagerPieces.runs += 1
        self._context, self._on_layers = context, on_layers
        self._work(cast(Pieces, self))

    def cut(self, between: Callable[..., None], *tensors: torch.Tensor) -> None:
        between(*tensors, self._context)

    def layer_enqueued(self, layers: int) -> None:
        if self._on_layers is not None:
            self._on_layers(layers)


def give_prompt_graphs(monkeypatch: pytest.MonkeyPatch, backend: ModelBackend, sizes: Sequence[int]) -> None:
    """Have the backend capture steps of up to the largest size, all but their attention, padded to one of the sizes."""
    monkeypatch.setattr(prompt_graphs, "Pieces", EagerPieces)
    monkeypatch.setattr(prompt_graphs, "graph_pool", lambda: None)
    monkeypatch.setattr(EagerPieces, "runs", 0)
    with torch.inference_mode():
        captured = PromptGraphs(backend._model, backend.state, sizes)
    backend._sizes = [*sizes, backend._model.config.max_position_embeddings]
    backend._batches = replace(backend._batches, size=backend._size, graphs=captured)


class EagerGraphs:
    """Graphs of decode steps that a backend uses as it would use a GPU's.

    Attributes:
        runs: how many graphs were run since a backend was given them.
        others: the shapes of these backends' steps that no graph computed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs = 0
        self.others: list[StepShape] = []
        self._monkeypatch = monkeypatch
        for module in (graphs, draft_graphs):
            monkeypatch.setattr(module, "capture", self._capture)
            monkeypatch.setattr(module, "graph_pool", lambda: None)

    def give_to(
        self, backend: ModelBackend, rows: Sequence[int], drafts: int | None = None, two_batch: TwoBatch = NEVER
    ) -> None:
        """rows: sizes of the steps that are captured; drafts: None for a backend that does not draft."""
        blocks = blocks_for(backend.context_tokens + (drafts or 0) + 1)
        with torch.inference_mode():
            if drafts is None:
                backend._graphs = DecodeGraphs(backend._model, backend.state, rows, blocks, two_batch)
            else:
                given = backend._model, backend.state, rows, [drafts], blocks, two_batch
                backend._draft_graphs = DraftGraphs(*given)
        note_others(self._monkeypatch, backend, self.others)
        self.runs = 0

    def _capture(self, work: Callable[[], None], pool: None) -> Callable[[], None]:
        def run() -> None:
            self.runs += 1
            work()

        return run
