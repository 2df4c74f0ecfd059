"""Stand-ins for captured graphs on a CPU: what a graph would capture runs eagerly, over the same tensors."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch

from engine.backend import Launched
from engine.batch import Batch
from engine.model.context import ForwardContext
from engine.model.model import OnLayers
from engine.runner.backend import ModelBackend
from engine.runner.capture import Pieces
from engine.runner.prompt_graphs import PromptGraphs
from engine.runner.sizes import padded_size
from engine.step.shape import StepShape
from engine.step.two_batch import NEVER, TwoBatch


class EagerCapture:
    """An `engine.runner.capture.Capture`.

    Attributes:
        runs: how often whole work and work in pieces was run again.
    """

    def __init__(self) -> None:
        self.runs = 0

    def whole(self, work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            self.runs += 1
            work()

        return run

    def in_pieces(self, work: Callable[[Pieces], None]) -> Pieces:
        return _EagerPieces(self, work)


class _EagerPieces:
    def __init__(self, capture: EagerCapture, work: Callable[[Pieces], None]) -> None:
        self._capture = capture
        self._work = work

    def run(self, context: ForwardContext, on_layers: OnLayers | None) -> None:
        self._capture.runs += 1
        self._context, self._on_layers = context, on_layers
        self._work(self)

    def cut(self, between: Callable[..., None], *tensors: torch.Tensor) -> None:
        between(*tensors, self._context)

    def layer_enqueued(self, layers: int) -> None:
        if self._on_layers is not None:
            self._on_layers(layers)


def note_others(monkeypatch: pytest.MonkeyPatch, backend: ModelBackend, others: list[StepShape]) -> None:
    """Add to `others` the shapes of steps that no graph computes."""
    launch = backend.launch

    def noted(batch: Batch, shape: StepShape) -> Launched:
        if not backend.steps.graphs.fit(shape):
            others.append(shape)
        return launch(batch, shape)

    monkeypatch.setattr(backend, "launch", noted)


def pad_steps(backend: ModelBackend, sizes: Sequence[int]) -> None:
    """Have the backend pad steps to one of the sizes, if the largest holds them."""
    backend.steps.batches = replace(backend.steps.batches, size=partial(padded_size, sizes=sizes))


def give_prompt_graphs(backend: ModelBackend, sizes: Sequence[int], decoding: int = 8) -> EagerCapture:
    """Have the backend capture steps of up to the largest size, padded to one of the sizes: all but the attention of
    prompts, and of more than `decoding` rows that decode.
    """
    capture = EagerCapture()
    with torch.inference_mode():
        graphs = PromptGraphs(backend.weights, backend.state, sizes, capture, decoding)
    capture.runs = 0
    pad_steps(backend, [*sizes, backend.weights.config.max_position_embeddings])
    backend.steps.batches = replace(backend.steps.batches, graphs=graphs)
    return capture


class EagerGraphs:
    """Graphs of decode steps that a backend uses as it would use a GPU's.

    Attributes:
        runs: how many graphs were run since a backend was given them.
        others: the shapes of these backends' steps that no graph computed.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.others: list[StepShape] = []
        self._capture = EagerCapture()
        self._monkeypatch = monkeypatch

    @property
    def runs(self) -> int:
        return self._capture.runs

    def give_to(self, backend: ModelBackend, rows: Sequence[int], two_batch: TwoBatch = NEVER) -> None:
        """rows: sizes of the steps that are captured."""
        backend.steps.capture(rows, backend.context_tokens, self._capture, two_batch)
        note_others(self._monkeypatch, backend, self.others)
        self._capture.runs = 0
