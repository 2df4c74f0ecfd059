"""Small tensors between host and device without waiting: through pinned memory, in the stream's order."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


def to_device(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """values on the device. The pinned memory that they pass through is used again only after the copy."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def copy_to_device(values: npt.NDArray[np.generic], target: torch.Tensor) -> None:
    """The same into a tensor of the device that exists already, of the values' shape and dtype."""
    tensor = torch.from_numpy(values)
    target.copy_(tensor.pin_memory() if target.is_cuda else tensor, non_blocking=True)


class HostCopies:
    """Tensors of one device on their way to the host, behind whatever the device has to do before."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._copies = list(tensors)
        self._done: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            self._copies = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
            for copy, tensor in zip(self._copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            # Who waits sleeps: a step launched ahead keeps the device busy meanwhile.
            self._done = torch.cuda.Event(blocking=True)
            self._done.record()

    def read(self) -> list[torch.Tensor]:
        """Waits for them."""
        if self._done is not None:
            self._done.synchronize()
        return self._copies
