"""Copies small tensors between host and device through pinned memory, in the stream's order, without waiting."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch


def to_device(values: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Copy values to the device. The pinned memory that they pass through is reused only after the copy."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def to_indices(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """The values on the device, int64."""
    return to_device(np.array(values, np.int64), device)


def copy_to_device(values: npt.NDArray[np.generic], target: torch.Tensor) -> None:
    """Copy values into an existing tensor of their shape and dtype."""
    tensor = torch.from_numpy(values)
    target.copy_(tensor.pin_memory() if target.is_cuda else tensor, non_blocking=True)


class HostCopies:
    """Copies of one device's tensors to the host, queued after the device's earlier work."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._copies = list(tensors)
        self._done: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            self._copies = [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
            for copy, tensor in zip(self._copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            # A waiting host thread sleeps: a step launched ahead keeps the device busy meanwhile.
            self._done = torch.cuda.Event(blocking=True)
            self._done.record()

    @property
    def done(self) -> bool:
        """Whether `read` would not wait."""
        return self._done is None or self._done.query()

    def read(self) -> list[torch.Tensor]:
        """Wait for the copies and return them."""
        if self._done is not None:
            self._done.synchronize()
        return self._copies
