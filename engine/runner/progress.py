"""How far a step has come on a device that computes while the host does other things."""

import time
from collections import deque
from collections.abc import Callable

import torch

# How often it looks whether a layer is done.
_LOOK_SECONDS = 1e-4


class DeviceProgress:
    """Events on the current stream: one after each layer that somebody wants to hear of, and one behind the step."""

    def __init__(self, on_layers: Callable[[int], None] | None) -> None:
        """on_layers: engine.batch.Batch's."""
        self._on_layers = on_layers
        self._layers: deque[tuple[int, torch.cuda.Event]] = deque()
        # Who waits for it sleeps.
        self._end = torch.cuda.Event(blocking=True)

    @property
    def layer_hook(self) -> Callable[[int], None] | None:
        """What to call when so many layers are enqueued; None where nobody wants to hear of them."""
        return None if self._on_layers is None else self._layer_enqueued

    def enqueued(self) -> None:
        """All of the step is."""
        self._end.record()

    def synchronize(self) -> None:
        """Wait for the step, and tell of its layers meanwhile."""
        self._tell()
        while self._layers:
            time.sleep(_LOOK_SECONDS)
            self._tell()
        self._end.synchronize()

    def _layer_enqueued(self, layers: int) -> None:
        event = torch.cuda.Event()
        event.record()
        self._layers.append((layers, event))
        # The first layers may be done before the last is enqueued.
        self._tell()

    def _tell(self) -> None:
        written = None
        while self._layers and self._layers[0][1].query():
            written, _ = self._layers.popleft()
        if written is not None and self._on_layers is not None:
            self._on_layers(written)
