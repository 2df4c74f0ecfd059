"""Makes the uninitialised tensors and layers of one model."""

from collections.abc import Sequence

import torch

from engine.model.formats.choice import Formats
from engine.model.formats.interface import Experts, ExpertShape, Linear
from engine.model.formats.plain import PlainFormat
from engine.model.side_stream import SideStream


class Allocator:
    """One dtype and one device. Layers get the model's formats, or are plain if these do not take their shapes."""

    def __init__(self, dtype: torch.dtype, device: torch.device, formats: Formats) -> None:
        self.dtype = dtype
        self.device = device
        self.formats = formats
        # All layers share it.
        self.side_stream = SideStream(device)

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def linear(self, inputs: int, parts: Sequence[int]) -> Linear:
        """parts: rows of the published matrices that the layer's weight joins."""
        wanted = self.formats.linear
        form = wanted if wanted.takes(parts, inputs) else PlainFormat()
        return form.linear(parts, inputs, self)

    def experts(self, shape: ExpertShape) -> Experts:
        wanted = self.formats.experts
        form = wanted if wanted.takes_experts(shape) else PlainFormat()
        return form.experts(shape, self)
