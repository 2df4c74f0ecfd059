"""A second stream of a CUDA device, for work of a step that may run at the same time as the rest."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch

from kernels.fp8_gemm import Workspace, make_workspace

# The priority of captured steps, whose kernels keep it. With a lower one, kernels here would run after the step's, not
# at the same time.
PRIORITY = -1


class SideStream:
    """Belongs to a model. A step that has begun work here joins it before anything reads the results."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @contextmanager
    def branch(self) -> Iterator[Workspace]:
        """Kernels launched inside the block wait for those already queued on the current stream, and for none after."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield self._workspace

    def join(self) -> None:
        """Kernels queued on the current stream from now on wait for all that were launched here.

        Until then the caller keeps the tensors that these read: their memory belongs to the current stream.
        """
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device, priority=PRIORITY)

    @cached_property
    def _workspace(self) -> Workspace:
        return make_workspace(self._device, shares_chip=True)
