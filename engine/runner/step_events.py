"""Which layers of a step a GPU has done."""

import time
from collections import deque
from collections.abc import Callable

import torch

# How often the host looks whether a layer is done.
_LOOK_SECONDS = 1e-4


class StepEvents:
    """Events on the current stream: one behind each layer, if somebody waits for layers, and one behind the step."""

    def __init__(self, on_layers: Callable[[int], None] | None, check: Callable[[], None]) -> None:
        """on_layers: see engine.batch.Batch; check: raises if what the step computed is worthless."""
        self._on_layers = on_layers
        self._check = check
        self._layers: deque[tuple[int, torch.cuda.Event]] = deque()
        # A thread that waits for it sleeps.
        self._end = torch.cuda.Event(blocking=True)

    @property
    def layer_hook(self) -> Callable[[int], None] | None:
        """A function to call when the first n layers are enqueued; None if nobody waits for layers."""
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
