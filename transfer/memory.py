"""The memory that holds KV, as the transfer thread uses it: a rank's pool on CPU or GPU, or a store's slab."""

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from transfer.checksum import Bytes
from transfer.transport import Transmission

Result = TypeVar("Result", covariant=True)


class Pending(Protocol[Result]):
    """Work in progress that uses a staging buffer and blocks."""

    @property
    def completed(self) -> bool: ...

    def result(self) -> Result:
        """Wait until the work has completed; returns its result."""
        ...


class Done(Generic[Result]):
    """Work that has completed."""

    completed = True

    def __init__(self, result: Result) -> None:
        self._result = result

    def result(self) -> Result:
        return self._result


class Run(NamedTuple):
    """Bytes to copy: where they begin in their source, and where in the buffer that takes them."""

    start: int
    place: int
    size_bytes: int


class HostSource(Protocol):
    """Memory that this process has mapped, to copy from into staging buffers."""

    def stage(self, runs: Sequence[Run], staging: Any) -> Transmission:
        """Begin to copy these bytes to `staging`, which the copies use until they have completed."""
        ...


class KvMemory(Protocol):
    """KV as [layers, blocks] pieces of `piece_bytes`, each contiguous. Used by the transfer thread only."""

    layers: int
    blocks: int
    # Size of one block in one layer.
    piece_bytes: int
    is_on_gpu: bool

    def allocate_staging(self, size_bytes: int) -> Any:
        """A uint8 buffer that can be sliced and passed to UCX (buffer protocol or __cuda_array_interface__)."""
        ...

    def enter_thread(self) -> None:
        """From now on the calling thread is the only one that uses the memory."""
        ...

    def read_staging(self, staging: Any, size_bytes: int) -> memoryview:
        """The first bytes of a staging buffer, for the host to read at once: what was gathered or received there."""
        ...

    def host_source(self, mapped: Bytes) -> HostSource:
        """Prepare to copy from this memory, which another process may write. Raises OSError if that cannot be."""
        ...

    def prepare(self, key: bytes) -> None:
        """A transfer with this key begins soon: prepare what its checksums need."""
        ...

    def gather(
        self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: Any, key: bytes
    ) -> Pending[bytes]:
        """Copy the pieces, layer-major, to the start of `staging`. The result is their checksum (`transfer.checksum`).

        The copy includes everything that was computed before this call.
        """
        ...

    def land(
        self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: Any, key: bytes, checksum: bytes
    ) -> Pending[bool]:
        """Copy the pieces from the start of `staging` to the blocks if they have this checksum. The result is whether
        they do.

        If they do not, nothing is written. Work that begins after completion sees the pieces.
        """
        ...

    def place(self, first_layer: int, layer_count: int, blocks: Sequence[int], staging: Any) -> Pending[bool]:
        """Copy the pieces from the start of `staging` to the blocks, whatever they are: there the layers of the first
        block come first, then those of the next. The result is True. Work that begins after completion sees them.
        """
        ...


def staged_pieces(memory: KvMemory, staging: Any, size_bytes: int) -> list[memoryview]:
    """The pieces at the start of a staging buffer, in order."""
    staged, piece_bytes = memory.read_staging(staging, size_bytes), memory.piece_bytes
    return [staged[start : start + piece_bytes] for start in range(0, size_bytes, piece_bytes)]
