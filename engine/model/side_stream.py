"""A second stream of a CUDA device, for work that need not wait for what its own step does meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import torch

from kernels.fp8_gemm import Workspace, make_workspace

# The priority of captured steps, whose kernels keep it. With a lower one, work here would run after the step's kernels,
# not beside them.
PRIORITY = -1


class SideStream:
    """Belongs to a model. A step that has begun work here joins it before anything reads the results."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @contextmanager
    def beside(self) -> Iterator[Workspace]:
        """What is launched within waits for what the current stream has been given so far, and for nothing later."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield self._workspace

    def join(self) -> None:
        """Work that the current stream is given from now on waits for all that this stream has been given.

        Until then the caller keeps the tensors that work here reads: their memory belongs to the current stream.
        """
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device, priority=PRIORITY)

    @cached_property
    def _workspace(self) -> Workspace:
        return make_workspace(self._device, beside=True)
