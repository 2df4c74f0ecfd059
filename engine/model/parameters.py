"""Which part of which published tensor goes where."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from engine.model.share import ModelShare


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor of the checkpoint, or the part of it that this rank holds, and its place in memory."""

    # The tensor's name in the checkpoint.
    name: str
    # Perhaps a part of a fused matrix; of four dimensions where a matrix does not lie in one piece, [parts, rows of a
    # part, parts, columns of a part].
    place: torch.Tensor
    # The shape of the whole published tensor.
    shape: tuple[int, ...]
    # By dimension, the part of the published tensor that belongs to the place.
    slices: tuple[slice, ...]

    def __post_init__(self) -> None:
        assert self.part_shape == merged_shape(self.place) and len(self.slices) == len(self.shape)
        assert all(part.step is None and part.stop <= size for part, size in zip(self.slices, self.shape, strict=True))

    @property
    def part_shape(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.slices)


NamedParameters = Iterator[Parameter]


def _nothing() -> None:
    """The `finish` of parameters that are used as they are: nothing is left to do."""


@dataclass(frozen=True, slots=True)
class Part:
    """Parameters that are filled together."""

    parameters: Sequence[Parameter]
    # Called once these are filled, before those of the next part are: some parts' places lie in the same memory.
    finish: Callable[[], None] = _nothing


def whole(name: str, place: torch.Tensor) -> Parameter:
    """A published tensor that this rank holds whole."""
    shape = merged_shape(place)
    return Parameter(name, place, shape, tuple(slice(0, size) for size in shape))


def cut(parameters: Iterable[Parameter], dimension: int, share: ModelShare) -> NamedParameters:
    """The same places, as parts of larger tensors: along the dimension each is this rank's share of its published
    tensor. A single number is whole on every rank.
    """
    for each in parameters:
        if share.count == 1 or each.shape == (1,):
            yield each
            continue
        size, part = each.shape[dimension], each.slices[dimension]
        first = share.index * size
        shape, slices = list(each.shape), list(each.slices)
        shape[dimension] = size * share.count
        slices[dimension] = slice(first + part.start, first + part.stop)
        yield replace(each, shape=tuple(shape), slices=tuple(slices))


def merged_shape(place: torch.Tensor) -> tuple[int, ...]:
    """The shape of the matrix whose parts a place of four dimensions holds; the shape itself of other places."""
    if place.dim() < 4:
        return tuple(place.shape)
    return place.shape[:2].numel(), place.shape[2:].numel()


def joined_rows(parts: torch.Tensor) -> torch.Tensor:
    """The place of one matrix whose rows lie in parts: [parts, rows of a part, columns]."""
    return parts[0] if len(parts) == 1 else parts.unsqueeze(2)


def joined_columns(parts: torch.Tensor) -> torch.Tensor:
    """The place of one matrix whose columns lie in parts: [parts, rows, columns of a part]."""
    return parts[0] if len(parts) == 1 else parts.transpose(0, 1).unsqueeze(0)
