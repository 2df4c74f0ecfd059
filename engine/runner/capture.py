"""Work that is captured to run again with few launches: whole steps, or steps in pieces (piecewise CUDA graphs)."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from engine.model.context import ForwardContext
from engine.model.model import OnLayers
from engine.runner.graph_launch import launcher

# Captured kernels keep their stream's priority; lower numbers go first.
HIGH_PRIORITY = -1
# What a capture does not allow, it forbids to its own thread. By default a thread that page-locks memory would end it.
ERROR_MODE = "thread_local"
# By the bytes of an element: an integer type as which any such tensor can be described.
_INTEGERS = {1: (torch.uint8, "|u1"), 2: (torch.int16, "<i2"), 4: (torch.int32, "<i4"), 8: (torch.int64, "<i8")}


class Pieces(Protocol):
    """The captured pieces of one step."""

    def cut(self, between: Callable[..., None], *tensors: torch.Tensor) -> None:
        """See engine.model.context.Cut."""
        ...

    def layer_enqueued(self, layers: int) -> None:
        """This many layers are complete here, which the step reports."""
        ...

    def run(self, context: ForwardContext, on_layers: OnLayers | None) -> None:
        """on_layers: see engine.model.model.Model.forward; it is called a little later than there."""
        ...


class Capture(Protocol):
    """Captures work that always uses the same tensors. What one capture has captured runs one at a time.

    Compilation and one-time allocations must not happen in a capture: what the work launches has run before.
    """

    def whole(self, work: Callable[[], None]) -> Callable[[], None]:
        """Capture the work. Returns a function that runs it."""
        ...

    def in_pieces(self, work: Callable[[Pieces], None]) -> Pieces:
        """Capture the work. It calls `cut` and `layer_enqueued` of what it is given."""
        ...


class CudaCapture:
    """A `Capture` as CUDA graphs, which share memory: the largest, captured first, sets its size."""

    def __init__(self) -> None:
        # Memory that earlier steps have left would not be there for graphs.
        torch.cuda.empty_cache()
        self._handle: Any = torch.cuda.graph_pool_handle()
        # The stream on which all are captured, since torch reuses what is freed on a stream for that stream alone. Its
        # priority puts steps before the copies of transfers, which use what steps leave of the device.
        self._stream = torch.cuda.Stream(priority=HIGH_PRIORITY)

    def whole(self, work: Callable[[], None]) -> Callable[[], None]:
        # Not `torch.cuda.graph`, which waits for the device and gives its free memory back before each capture.
        graph = torch.cuda.CUDAGraph()
        with _capturing(self._stream):
            graph.capture_begin(self._handle, ERROR_MODE)
            try:
                work()
            finally:
                graph.capture_end()
        return launcher(graph)

    def in_pieces(self, work: Callable[[Pieces], None]) -> Pieces:
        return _CudaPieces(work, self._handle, self._stream)


@dataclass
class _Piece:
    graph: torch.cuda.CUDAGraph
    # Numbers of layers that are complete after this piece, each of which the step reports.
    layers: list[int] = field(default_factory=list)
    # What runs after it; None for the last.
    between: Callable[[ForwardContext], None] | None = None


class _CudaPieces:
    def __init__(self, work: Callable[[Pieces], None], handle: Any, stream: torch.cuda.Stream) -> None:
        """work: is captured, not run; it calls `cut` and `layer_enqueued`."""
        self._handle = handle
        self._pieces: list[_Piece] = []
        with _capturing(stream):
            self._begin()
            try:
                work(self)
            finally:
                self._end()
        self._launchers = [launcher(piece.graph) for piece in self._pieces]

    def cut(self, between: Callable[..., None], *tensors: torch.Tensor) -> None:
        self._end()
        # A layer's tensors may lie where those of the layer before lie, so `between` must not keep their memory.
        self._pieces[-1].between = partial(between, *map(_alias, tensors))
        self._begin()

    def layer_enqueued(self, layers: int) -> None:
        self._pieces[-1].layers.append(layers)

    def run(self, context: ForwardContext, on_layers: OnLayers | None) -> None:
        for piece, launch in zip(self._pieces, self._launchers, strict=True):
            launch()
            if on_layers is not None:
                for layers in piece.layers:
                    on_layers(layers)
            if piece.between is not None:
                piece.between(context)

    def _begin(self) -> None:
        self._pieces.append(_Piece(torch.cuda.CUDAGraph()))
        self._pieces[-1].graph.capture_begin(self._handle, ERROR_MODE)

    def _end(self) -> None:
        self._pieces[-1].graph.capture_end()


@contextmanager
def _capturing(stream: torch.cuda.Stream) -> Iterator[None]:
    """On the stream, while no garbage is collected: some would end events or graphs of the device, which a capture does
    not allow. Collecting it before each capture instead would take a tenth of a second.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        if collects:
            gc.enable()


class _Memory:
    """Describes memory to torch, without owning it."""

    def __init__(self, tensor: torch.Tensor, kind: str) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
            "typestr": kind,
            "data": (tensor.data_ptr(), False),
        }


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory, which does not keep that memory alive."""
    integer, kind = _INTEGERS[tensor.itemsize]
    alias = torch.as_tensor(_Memory(tensor, kind), device=tensor.device)
    assert alias.data_ptr() == tensor.data_ptr() and alias.dtype == integer
    return alias.view(tensor.dtype)
