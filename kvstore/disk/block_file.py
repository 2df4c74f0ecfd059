"""A preallocated file of slots, each with a block, what it is, and a checksum over both.

Whatever a crash, another program or the medium makes of a slot, `read` returns a block that was written as the one that
is asked for, or raises. So nothing need be flushed, and nothing is repaired.
"""

import errno
import fcntl
import mmap
import os
import queue
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import xxhash

from kvstore.disk.content import Content
from kvstore.keys import Key
from kvstore.quotas import Tenant
from kvstore.store_memory import ALIGNMENT
from transfer.ticket import BlockMac

_CHECKSUM_BYTES = 16
_LENGTH_BYTES = 4
# A header without its MACs, as MessagePack: the longest id of a worker has 256 characters of 4 bytes.
_NAMES_BYTES = 1024 + 512
_TAG_BYTES = 16
_VERSION = 1
_FILE_ID_BYTES = 16


MessageT = TypeVar("MessageT", bound=msgspec.Struct)


class DamagedBlock(Exception):
    """A slot has another block than was asked for, or none that was written whole."""


class TooSmall(Exception):
    """The file has no room for one block."""


class Shape(msgspec.Struct, frozen=True, array_like=True):
    """Files of another shape are begun anew."""

    version: int
    layers: int
    block_bytes: int


class _Begin(msgspec.Struct, frozen=True, array_like=True):
    """The file's first page. Slots name the file: those of an earlier one in its place are not taken for its."""

    shape: Shape
    file_id: bytes


class _Header(msgspec.Struct, frozen=True, array_like=True):
    """What is in a slot."""

    file_id: bytes
    key: Key
    # xxh3_128 of the block.
    checksum: bytes
    mac: BlockMac | None
    # Files of the version before have none.
    tenant: Tenant = b""
    # The same; nor is there one at the root.
    parent: Key | None = None


class BlockFile:
    """Thread-safe, except that a slot is written by one thread while nobody reads it. Raises OSError."""

    def __init__(self, path: Path, layers: int, block_bytes: int, size_bytes: int, threads: int) -> None:
        """`threads`: how many may read and write at a time.

        Blocks of whole pages bypass the page cache, and must then lie on pages in memory, as `StoreMemory` has them.
        Raises TooSmall, and BlockingIOError if another process has the file.
        """
        self._shape = Shape(_VERSION, layers, block_bytes)
        self._header_bytes = _aligned(_LENGTH_BYTES + _NAMES_BYTES + layers * _TAG_BYTES + _CHECKSUM_BYTES)
        self._slot_bytes = self._header_bytes + _aligned(block_bytes)
        self.slots = (size_bytes - ALIGNMENT) // self._slot_bytes
        if self.slots <= 0:
            raise TooSmall(f"one block takes {self._slot_bytes} bytes on disk: raise disk.bytes")
        self._file = _open(path, direct=not block_bytes % ALIGNMENT)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _allocate(self._file, ALIGNMENT + self.slots * self._slot_bytes)
            # Pages of their own, which are aligned, for headers.
            self._buffers: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
            for _ in range(threads):
                self._buffers.put(mmap.mmap(-1, self._header_bytes))
            self._file_id = self._begin()
        except BaseException:
            os.close(self._file)
            raise

    def close(self) -> None:
        os.close(self._file)

    def write(self, slot: int, content: Content, block: memoryview, mac: BlockMac | None) -> None:
        checksum = xxhash.xxh3_128_digest(block)
        header = _Header(self._file_id, content.key, checksum, mac, content.tenant, content.parent)
        with self._buffer() as page:
            _put(page, header)
            _whole(os.pwritev(self._file, [page, block], self._offset(slot)), len(page) + len(block))

    def read(self, slot: int, key: Key, block: memoryview) -> BlockMac | None:
        """Put the block of that key where `block` is, and return its MACs.

        Raises DamagedBlock; whatever happens, what `block` had before is lost.
        """
        with self._buffer() as page:
            _whole(os.preadv(self._file, [page, block], self._offset(slot)), len(page) + len(block))
            header = self._header(page)
        if header is None or header.key != key or header.checksum != xxhash.xxh3_128_digest(block):
            raise DamagedBlock
        return header.mac

    def content_of(self, slot: int) -> Content | None:
        """What is said to be in a slot; `read` shows whether it is."""
        with self._buffer() as page:
            _whole(os.preadv(self._file, [page], self._offset(slot)), self._header_bytes)
            header = self._header(page)
        return None if header is None else Content(header.key, header.tenant, header.parent)

    def _header(self, page: memoryview) -> _Header | None:
        header = _get(page, _Header)
        return header if header is not None and header.file_id == self._file_id else None

    def _begin(self) -> bytes:
        """The id of the file that is there, if it has this shape; of a new one otherwise."""
        with self._buffer() as buffer:
            page = buffer[:ALIGNMENT]
            os.preadv(self._file, [page], 0)
            begin = _get(page, _Begin)
            if begin is None or begin.shape != self._shape:
                begin = _Begin(self._shape, secrets.token_bytes(_FILE_ID_BYTES))
                _put(page, begin)
                _whole(os.pwrite(self._file, page, 0), ALIGNMENT)
        return begin.file_id

    def _offset(self, slot: int) -> int:
        assert 0 <= slot < self.slots
        return ALIGNMENT + slot * self._slot_bytes

    @contextmanager
    def _buffer(self) -> Iterator[memoryview]:
        buffer = self._buffers.get()
        try:
            with memoryview(buffer) as view:
                yield view
        finally:
            self._buffers.put(buffer)


def _put(page: memoryview, message: msgspec.Struct) -> None:
    body = msgspec.msgpack.encode(message)
    sized = len(body).to_bytes(_LENGTH_BYTES, "little") + body
    assert len(sized) + _CHECKSUM_BYTES <= len(page), "a header larger than its page"
    whole = sized + xxhash.xxh3_128_digest(sized)
    page[: len(whole)] = whole


def _get(page: memoryview, message_type: type[MessageT]) -> MessageT | None:
    """None if there is none that was written whole."""
    end = _LENGTH_BYTES + int.from_bytes(page[:_LENGTH_BYTES], "little")
    if end + _CHECKSUM_BYTES > len(page) or page[end : end + _CHECKSUM_BYTES] != xxhash.xxh3_128_digest(page[:end]):
        return None
    with suppress(msgspec.DecodeError):
        return msgspec.msgpack.decode(page[_LENGTH_BYTES:end], type=message_type)
    return None


def _open(path: Path, direct: bool) -> int:
    """`direct`: past the page cache, which would keep blocks that memory has already, where the file system can."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    if not direct:
        return os.open(path, flags, 0o600)
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600)


def _allocate(file: int, size_bytes: int) -> None:
    """The machine gives all of it now, or says that it has not so much."""
    before = os.fstat(file).st_size
    try:
        os.posix_fallocate(file, 0, size_bytes)
    except OSError:
        # What there was until it ended, ext4 has given: others shall have it again.
        os.ftruncate(file, before)
        raise
    os.ftruncate(file, size_bytes)


def _whole(done: int, wanted: int) -> None:
    if done != wanted:
        raise OSError(errno.EIO, f"{done} of {wanted} bytes")


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
