"""KV memory whose staging buffers UCX cannot read, as it cannot read a GPU's for a peer without one."""

from typing import Any

import numpy as np

from transfer.host_memory import HostMemory
from transfer.memory import Pool


class _Slot:
    """It has no bytes that could be taken or sent, but on its host side."""

    def __init__(self, host_side: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        self.host_side = host_side


class FarMemory(HostMemory):
    def __init__(self, array: Pool) -> None:
        super().__init__(array)

    def allocate_staging(self, size_bytes: int) -> Any:
        return _Slot(super().allocate_staging(size_bytes))

    def host_side(self, staging: Any) -> Any:
        return staging.host_side
