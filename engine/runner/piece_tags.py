"""MACs of a KV pool's pieces, which the pool's device hashes where they lie."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kernels.ghash import hash_pieces
from transfer.gmac import TAG_BYTES, hash_key_and_masks
from transfer.memory import KeyedPieces


class TagsInProgress:
    """Tags of pieces, which the current stream hashes after what was queued before."""

    def __init__(self, planes: Sequence[torch.Tensor], blocks: Sequence[int], keyed: Sequence[KeyedPieces]) -> None:
        """planes: of the pool, [layers, blocks, bytes] uint8; blocks: of the pool, by their number in `keyed`."""
        keys, masks = zip(*(hash_key_and_masks(each.key, each.first_layer, each.layers) for each in keyed), strict=True)
        self._masks: Sequence[bytes] = masks
        counts = [each.layers for each in keyed]
        layers = np.concatenate([each.first_layer + np.arange(each.layers) for each in keyed])
        places = np.repeat([(blocks[each.block], key) for key, each in enumerate(keyed)], counts, axis=0)
        device = planes[0].device
        hashes = hash_pieces(
            planes,
            _moved(np.column_stack((layers, places)).astype(np.int32), device),
            _moved(np.frombuffer(bytearray().join(keys), np.uint8), device).view(-1, TAG_BYTES),
        )
        self._hashes = torch.empty(hashes.shape, dtype=torch.uint8, pin_memory=hashes.is_cuda)
        self._hashes.copy_(hashes, non_blocking=True)

    def result(self) -> list[bytes]:
        """To be called once the stream has finished that."""
        hashes, tags, start = self._hashes.numpy().reshape(-1), [], 0
        for masks in self._masks:
            tags.append((hashes[start : start + len(masks)] ^ np.frombuffer(masks, np.uint8)).tobytes())
            start += len(masks)
        return tags


def _moved(values: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Queue a copy to the device."""
    staged = torch.from_numpy(values)
    return (staged.pin_memory() if device.type == "cuda" else staged).to(device, non_blocking=True)
