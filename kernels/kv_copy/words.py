"""The pool as words of eight bytes: a device moves single bytes several times as slowly."""

from collections.abc import Sequence

import torch


def as_words(planes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of [layers, blocks, ...] as int64 [layers, blocks, words]. planes: contiguous, of any dtype, with a
    multiple of 8 bytes of a block in a layer.
    """
    return [plane.flatten(2).view(torch.uint8).view(torch.int64) for plane in planes]
