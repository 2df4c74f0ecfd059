"""Where the KV of a row's tokens lies in the pool."""

import numpy as np
import numpy.typing as npt

from engine.batch import Row
from mesh.blocks import BLOCK_TOKENS, blocks_for


def slots_between(row: Row, start: int, stop: int) -> npt.NDArray[np.int64]:
    """The pool slot of each position from `start` to `stop`."""
    positions = np.arange(start, stop, dtype=np.int64)
    blocks = np.array(row.block_ids[: blocks_for(stop)], dtype=np.int64)
    return blocks[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS


def written_slots(row: Row, padding_block: int) -> npt.NDArray[np.int64]:
    """The pool slot of each token's KV. The KV of shared tokens is there already: theirs goes to the padding block."""
    slots = slots_between(row, row.start, row.end)
    slots[: row.shared] = padding_block * BLOCK_TOKENS
    return slots
