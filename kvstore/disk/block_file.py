"""A preallocated file of slots. Each holds a block, its description, and a checksum of both.

Whatever a crash, another program or the medium does to a slot, `read` either returns a block that was written under the
requested key, or raises. So nothing needs to be flushed or repaired.
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
import numpy as np
import xxhash

from kvstore.disk.content import Content
from kvstore.keys import Key
from kvstore.quotas import Tenant
from mesh.memory.huge_pages import HUGE_PAGE_BYTES, huge_memory
from transfer.ticket import BlockMac

# Direct I/O needs offsets, lengths and memory aligned to this; it is at least the sector size of every common medium.
ALIGNMENT = 4096
_CHECKSUM_BYTES = 16
_LENGTH_BYTES = 4
# Size of a header without its MACs, as MessagePack: a worker's id has at most 256 characters of 4 bytes.
_NAMES_BYTES = 1024 + 512
_TAG_BYTES = 16
_VERSION = 1
_FILE_ID_BYTES = 16


MessageT = TypeVar("MessageT", bound=msgspec.Struct)


class DamagedBlock(Exception):
    """A slot holds another block than the requested one, or none that was written completely."""


class TooSmall(Exception):
    """The file is too small for one block."""


class Shape(msgspec.Struct, frozen=True, array_like=True):
    """The shape of a file. A file of another shape is overwritten."""

    version: int
    layers: int
    block_bytes: int


class _Begin(msgspec.Struct, frozen=True, array_like=True):
    """The file's first page. Slots contain the file's id, so that slots of an earlier file in the same place are not
    mistaken for this file's.
    """

    shape: Shape
    file_id: bytes


class _Header(msgspec.Struct, frozen=True, array_like=True):
    """The description of a slot's content."""

    file_id: bytes
    key: Key
    # xxh3_128 of the block.
    checksum: bytes
    mac: BlockMac | None
    # Absent in files of the previous version.
    tenant: Tenant = b""
    # Absent in files of the previous version, and at the root.
    parent: Key | None = None


class BlockFile:
    """Thread-safe, except that a slot must be written by one thread while no other reads it. Raises OSError."""

    def __init__(self, path: Path, layers: int, block_bytes: int, size_bytes: int, threads: int) -> None:
        """`threads`: how many threads may read and write at a time. Raises TooSmall, and BlockingIOError if another
        process uses the file.
        """
        self._shape = Shape(_VERSION, layers, block_bytes)
        self._header_bytes = _aligned(_LENGTH_BYTES + _NAMES_BYTES + layers * _TAG_BYTES + _CHECKSUM_BYTES)
        self._slot_bytes = self._header_bytes + _aligned(block_bytes)
        self.slots = (size_bytes - ALIGNMENT) // self._slot_bytes
        if self.slots <= 0:
            raise TooSmall(f"one block takes {self._slot_bytes} bytes on disk: raise disk.bytes")
        self._file = _open(path)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _allocate(self._file, ALIGNMENT + self.slots * self._slot_bytes)
            self._buffers: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
            for _ in range(threads):
                self._buffers.put(huge_buffer(self._slot_bytes))
            self._file_id = self._begin()
        except BaseException:
            os.close(self._file)
            raise

    def close(self) -> None:
        os.close(self._file)

    def write(self, slot: int, content: Content, block: memoryview, mac: BlockMac | None) -> None:
        with self._buffer() as buffer:
            body = self._body(buffer)
            _copy(body, block)
            checksum = xxhash.xxh3_128_digest(body)
            _put(
                buffer[: self._header_bytes],
                _Header(self._file_id, content.key, checksum, mac, content.tenant, content.parent),
            )
            _whole(os.pwrite(self._file, buffer, self._offset(slot)), self._slot_bytes)

    def read(self, slot: int, key: Key, block: memoryview) -> BlockMac | None:
        """Read the block of that key into `block`, and return its MAC. Raises DamagedBlock, with `block` untouched."""
        with self._buffer() as buffer:
            _whole(os.preadv(self._file, [buffer], self._offset(slot)), self._slot_bytes)
            header, body = self._header(buffer[: self._header_bytes]), self._body(buffer)
            if header is None or header.key != key or header.checksum != xxhash.xxh3_128_digest(body):
                raise DamagedBlock
            _copy(block, body)
            return header.mac

    def content_of(self, slot: int) -> Content | None:
        """What the slot's header says it contains; only `read` checks whether it does."""
        with self._buffer() as buffer:
            page = buffer[: self._header_bytes]
            _whole(os.preadv(self._file, [page], self._offset(slot)), self._header_bytes)
            header = self._header(page)
        return None if header is None else Content(header.key, header.tenant, header.parent)

    def _header(self, page: memoryview) -> _Header | None:
        header = _get(page, _Header)
        return header if header is not None and header.file_id == self._file_id else None

    def _begin(self) -> bytes:
        """The id of the existing file, if it has this shape; otherwise the id of a new file."""
        with self._buffer() as buffer:
            page = buffer[:ALIGNMENT]
            os.preadv(self._file, [page], 0)
            begin = _get(page, _Begin)
            if begin is None or begin.shape != self._shape:
                begin = _Begin(self._shape, secrets.token_bytes(_FILE_ID_BYTES))
                _put(page, begin)
                _whole(os.pwrite(self._file, page, 0), ALIGNMENT)
        return begin.file_id

    def _body(self, buffer: memoryview) -> memoryview:
        """The block in a buffer of its slot."""
        return buffer[self._header_bytes : self._header_bytes + self._shape.block_bytes]

    def _offset(self, slot: int) -> int:
        assert 0 <= slot < self.slots
        return ALIGNMENT + slot * self._slot_bytes

    @contextmanager
    def _buffer(self) -> Iterator[memoryview]:
        buffer = self._buffers.get()
        try:
            yield memoryview(buffer)[: self._slot_bytes]
        finally:
            self._buffers.put(buffer)


def _put(page: memoryview, message: msgspec.Struct) -> None:
    body = msgspec.msgpack.encode(message)
    sized = len(body).to_bytes(_LENGTH_BYTES, "little") + body
    assert len(sized) + _CHECKSUM_BYTES <= len(page), "a header larger than its page"
    whole = sized + xxhash.xxh3_128_digest(sized)
    page[: len(whole)] = whole


def _get(page: memoryview, message_type: type[MessageT]) -> MessageT | None:
    """The message; None if none was written completely."""
    end = _LENGTH_BYTES + int.from_bytes(page[:_LENGTH_BYTES], "little")
    if end + _CHECKSUM_BYTES > len(page) or page[end : end + _CHECKSUM_BYTES] != xxhash.xxh3_128_digest(page[:end]):
        return None
    with suppress(msgspec.DecodeError):
        return msgspec.msgpack.decode(page[_LENGTH_BYTES:end], type=message_type)
    return None


def huge_buffer(size_bytes: int) -> mmap.mmap:
    """At least so much memory, all of it in huge pages where this process may have them.

    Direct reads into it need a third of the processor time of those into pages of 4 KiB, as the store's memory mostly
    has, and are more than twice as fast. That pays for the copy.
    """
    return huge_memory(-(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES)


def _copy(to: memoryview, source: memoryview) -> None:
    """Without the interpreter lock."""
    np.frombuffer(to, np.uint8)[:] = np.frombuffer(source, np.uint8)


def _open(path: Path) -> int:
    """Bypass the page cache, if the file system can: it would keep blocks that are in memory already."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600)


def _allocate(file: int, size_bytes: int) -> None:
    """Have the file system allocate all of the file now, or raise if there is not enough space."""
    before = os.fstat(file).st_size
    try:
        os.posix_fallocate(file, 0, size_bytes)
    except OSError:
        # ext4 keeps what it allocated before it failed: give that back.
        os.ftruncate(file, before)
        raise
    os.ftruncate(file, size_bytes)


def _whole(done: int, wanted: int) -> None:
    if done != wanted:
        raise OSError(errno.EIO, f"{done} of {wanted} bytes")


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT) * ALIGNMENT
