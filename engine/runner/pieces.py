"""A step as several CUDA graphs, with what differs from step to step between them (piecewise CUDA graphs)."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch

from engine.model.context import ForwardContext
from engine.model.model import OnLayers
from engine.runner.graphs import GraphPool

# By the bytes of an element: an integer type as which any such tensor can be described.
_INTEGERS = {1: (torch.uint8, "|u1"), 2: (torch.int16, "<i2"), 4: (torch.int32, "<i4"), 8: (torch.int64, "<i8")}


@dataclass
class _Piece:
    graph: torch.cuda.CUDAGraph
    # Numbers of layers that are complete behind this piece, each of which the step reports.
    layers: list[int] = field(default_factory=list)
    # What runs behind it; None behind the last.
    between: Callable[[ForwardContext], None] | None = None


class Pieces:
    """The captured pieces of one step."""

    def __init__(self, work: Callable[["Pieces"], None], pool: GraphPool) -> None:
        """work: is captured, not run; it calls `cut` and `layer_enqueued`."""
        self._pool = pool
        self._pieces: list[_Piece] = []
        torch.cuda.synchronize()
        gc.collect()
        with torch.cuda.stream(pool.stream):
            self._begin()
            work(self)
            self._end()

    def cut(self, between: Callable[..., None], *tensors: torch.Tensor) -> None:
        """See engine.model.context.Cut."""
        self._end()
        # A layer's tensors may lie where those of the layer before lie, so `between` must not keep their memory.
        self._pieces[-1].between = partial(between, *map(_alias, tensors))
        self._begin()

    def layer_enqueued(self, layers: int) -> None:
        self._pieces[-1].layers.append(layers)

    def run(self, context: ForwardContext, on_layers: OnLayers | None) -> None:
        """on_layers: see engine.model.model.Model.forward; it is called a little later than there."""
        for piece in self._pieces:
            piece.graph.replay()
            if on_layers is not None:
                for layers in piece.layers:
                    on_layers(layers)
            if piece.between is not None:
                piece.between(context)

    def _begin(self) -> None:
        self._pieces.append(_Piece(torch.cuda.CUDAGraph()))
        self._pieces[-1].graph.capture_begin(self._pool.handle)

    def _end(self) -> None:
        self._pieces[-1].graph.capture_end()


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
