"""A step in flight: which layers a GPU has computed, and, without drafts, its logits and the tokens drawn from them."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch

from engine.batch import Row, Sample
from engine.model.context import DeviceState
from engine.runner.graphs import Likeliest
from engine.runner.prompt_logits import PendingPromptLogprobs
from engine.runner.sampler import PendingSamples, Sampler, draw_likeliest
from kernels.host_copy import to_indices
from mesh.domain.outputs import PromptLogprobs

# How often the host looks whether a layer is done.
_LOOK_SECONDS = 1e-4


class StepEvents:
    """Events on the current stream: one after each layer, if layers are reported, and one after the step."""

    def __init__(self, on_layers: Callable[[int], None] | None, check: Callable[[], None]) -> None:
        """on_layers: see engine.batch.Batch; check: raises RankLost if another rank did not answer during the step,
        whose results are then invalid.
        """
        self._on_layers = on_layers
        self._check = check
        self._layers: deque[tuple[int, torch.cuda.Event]] = deque()
        # A thread that waits for it sleeps.
        self._end = torch.cuda.Event(blocking=True)

    @property
    def layer_hook(self) -> Callable[[int], None] | None:
        """A function to call when the first n layers are enqueued; None if layers are not reported."""
        return None if self._on_layers is None else self._layer_enqueued

    def enqueued(self) -> None:
        """All of the step is enqueued."""
        self._end.record()

    def synchronize(self) -> None:
        """Wait for the step, and report its layers meanwhile."""
        self._report()
        while self._layers:
            time.sleep(_LOOK_SECONDS)
            self._report()
        self._end.synchronize()
        self._check()

    def _layer_enqueued(self, layers: int) -> None:
        event = torch.cuda.Event()
        event.record()
        self._layers.append((layers, event))
        # The first layers may be done before the last is enqueued.
        self._report()

    def _report(self) -> None:
        written = None
        while self._layers and self._layers[0][1].query():
            written, _ = self._layers.popleft()
        if written is not None and self._on_layers is not None:
            self._on_layers(written)


class LaunchedStep:
    """An `engine.backend.Launched` of a step without drafts."""

    def __init__(
        self,
        rows: Sequence[Row],
        drawing: Sequence[int],
        logits: torch.Tensor,
        state: DeviceState,
        sampler: Sampler,
        events: StepEvents | None,
        prompts: PendingPromptLogprobs | None = None,
        likeliest: Likeliest | None = None,
    ) -> None:
        """drawing: the rows that draw; logits: [drawing, vocabulary]; events: None on a CPU, whose step is done;
        prompts: None if no row reports any; likeliest: the most likely tokens, which `state.drawn` has too, if they are
        known: then all rows draw.
        """
        self._rows = len(rows)
        self._drawing = drawing
        self._drawn_rows = [rows[index] for index in drawing]
        self._logits: torch.Tensor | None = logits
        self._state = state
        self._sampler = sampler
        self._events = events
        self._prompts = prompts
        self._likeliest = likeliest
        self._pending: PendingSamples | None = None

    @torch.inference_mode()
    def draw(self) -> None:
        """Queue the draw, whose tokens the next step's rows may follow."""
        logits, self._logits = self._logits, None
        assert logits is not None, "a step draws once"
        if self._drawing:
            if self._likeliest is not None and draw_likeliest(self._drawn_rows):
                token_ids, on_host = self._likeliest
                self._pending = PendingSamples(logits, token_ids, self._drawn_rows, on_host)
            else:
                self._pending = PendingSamples(logits, self._draw(logits), self._drawn_rows)
        if self._events is not None:
            self._events.enqueued()

    def _draw(self, logits: torch.Tensor) -> torch.Tensor:
        """[drawing] int64, which `state.drawn` then has."""
        token_ids = self._sampler.draw(logits, self._drawn_rows)
        if len(self._drawing) == self._rows:
            # Mostly all rows draw: then no indices have to go to the device.
            self._state.drawn[: self._rows] = token_ids
        else:
            self._state.drawn[to_indices(self._drawing, self._state.device)] = token_ids
        return token_ids

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
