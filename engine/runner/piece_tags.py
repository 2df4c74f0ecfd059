"""MACs of pieces of KV, which a device hashes where they lie."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from kernels.ghash import hash_pieces
from transfer.gmac import TAG_BYTES, hash_key_and_masks
from transfer.memory import KeyedPieces


class TagsInProgress:
    """Tags of pieces, which the current stream hashes after what was queued before."""

    def __init__(
        self, planes: Sequence[torch.Tensor], blocks: Sequence[int], keyed: Sequence[KeyedPieces], first_layer: int = 0
    ) -> None:
        """planes: what has the pieces, [layers, blocks, bytes] uint8; blocks: where those are that `keyed` counts;
        first_layer: of the planes.
        """
        self._keyed, self._masks, count = keyed, bytearray(), sum(each.layers for each in keyed)
        # A GPU reads and writes all of this where it lies.
        job = torch.empty((len(keyed) + 2 * count, TAG_BYTES), dtype=torch.uint8, pin_memory=planes[0].is_cuda)
        keys, self._hashes, rest = job.split([len(keyed), count, count])
        pieces = rest.view(-1)[: 12 * count].view(torch.int32).view(count, 3)
        key_bytes, places, end = keys.numpy(), pieces.numpy(), 0
        for number, each in enumerate(keyed):
            key, masks = hash_key_and_masks(each.key, each.first_layer, each.layers)
            key_bytes[number] = np.frombuffer(key, np.uint8)
            self._masks += masks
            start, end = end, end + each.layers
            first = each.first_layer - first_layer
            places[start:end, 0] = range(first, first + each.layers)
            places[start:end, 1:] = blocks[each.block], number
        hash_pieces(planes, pieces, keys, self._hashes)

    def result(self) -> list[bytes]:
        """To be called once the stream has finished that."""
        tags = (self._hashes.numpy().reshape(-1) ^ np.frombuffer(self._masks, np.uint8)).tobytes()
        ends = accumulate(each.layers * TAG_BYTES for each in self._keyed)
        return [tags[end - each.layers * TAG_BYTES : end] for each, end in zip(self._keyed, ends, strict=True)]
