"""The disk tier: writes blocks while memory holds them, and reads them back if a lookup finds them only on disk.

A block that was used again is written while memory holds it, so eviction need not wait for the disk. A failure of the
disk only costs a recomputation: after a failed write the block is in memory only, and a failed read ends the answer to
its lookup before that block.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from kvstore.config import DiskConfig
from kvstore.directory import BlockDirectory
from kvstore.disk.block_file import BlockFile, DamagedBlock, TooSmall
from kvstore.disk.content import Content
from kvstore.disk.reuse import Reuse
from kvstore.disk.slot_table import SlotTable
from kvstore.keys import Key
from kvstore.quotas import NO_QUOTAS, Quotas, Tenant
from mesh.breaker import CircuitBreaker
from mesh.errors import ConfigError
from mesh.observe.metrics import KVSTORE_DISK_BLOCKS
from mesh.observe.spans import span
from transfer.kept_macs import KeptMacs

_log = logging.getLogger("deepmesh.kvstore")

# After this many failures in a row, the disk is not used for this long.
FAILURES = 3
REST_SECONDS = 10.0
# Number of slots between two log lines during recovery.
RECOVERY_NEWS = 4096


def prepare_directory(path: Path) -> None:
    """Make the directory of `disk.path` if it is missing. Raises ConfigError if it is none, or may not be written."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except FileExistsError:
        raise ConfigError(f"disk.path: {path} is not a directory") from None
    except OSError as error:
        raise ConfigError(f"disk.path: cannot write to {path}: {(error.strerror or str(error)).lower()}") from error


class Blocks(Protocol):
    """The store's memory."""

    def block(self, number: int) -> memoryview:
        """The bytes of a block, all layers."""
        ...


@dataclass(eq=False)
class Promotion:
    """Blocks that are being read for one lookup. Guarded by the tier's lock."""

    # Called with the number of leading blocks that are in memory, and whether no more will come.
    told: Callable[[int, bool], None]
    blocks: Sequence[int]
    keys: Sequence[Key]
    done: list[bool] = field(default_factory=list)
    # Number of leading blocks that are in memory.
    ready: int = 0
    # Whether no lookup waits for it any more, or a block of it could not be read.
    over: bool = False
    # The blocks that are leased for the lookup.
    leased: list[int] = field(default_factory=list)


class DiskTier:
    """Thread-safe. `changed` is called from its threads if there are keys to publish."""

    def __init__(
        self,
        config: DiskConfig,
        store_id: str,
        directory: BlockDirectory,
        memory: Blocks,
        changed: Callable[[], None],
        quotas: Quotas = NO_QUOTAS,
    ) -> None:
        self._config = config
        assert config.path is not None
        # Quoted, because a store id may be host:port or any other name.
        self._path = config.path / f"{quote(store_id, safe='')}.kv"
        self._directory = directory
        self._memory = memory
        self._changed = changed
        self._macs: KeptMacs | None = None
        self._lock = threading.Lock()
        self._table = SlotTable(directory.held, quotas)
        self._reuse = Reuse(config.least_uses, directory.total_blocks)
        self._breaker = CircuitBreaker(time.monotonic, FAILURES, REST_SECONDS)
        # Keys to be written, if memory still holds them when their turn comes.
        self._waiting: set[Key] = set()
        self._readers = ThreadPoolExecutor(config.threads, thread_name_prefix="disk-reads")
        # A single writer, so that writes take little from reads.
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="disk-writes")
        self._file: BlockFile | None = None
        self._without_file = False
        self._closing = False

    @property
    def total_blocks(self) -> int:
        return 0 if self._file is None else self._file.slots

    @property
    def used_blocks(self) -> int:
        return len(self._table)

    @property
    def tenant_blocks(self) -> dict[Tenant, int]:
        """Number of blocks of each tenant that has any."""
        return self._table.tenant_blocks

    @property
    def evicted_by_quota(self) -> Mapping[Tenant, int]:
        """Blocks evicted because their tenant had reached its quota."""
        return self._table.evicted_by_quota

    def open(self, layers: int, block_bytes: int, macs: KeptMacs) -> None:
        """Begin to open the file and to read what it contains. Until that is done, the disk counts as empty."""
        self._macs = macs
        self._writer.submit(self._open, layers, block_bytes)

    def close(self) -> None:
        """Close, after the reads and writes in progress have finished."""
        self._closing = True
        self._readers.shutdown(cancel_futures=True)
        self._writer.shutdown(cancel_futures=True)
        if self._file is not None:
            self._file.close()

    def stored(self, keys: Iterable[Key]) -> None:
        """Memory now holds these keys."""
        with self._lock:
            self._write_later(self._reuse.stored(keys))

    def used(self, keys: Iterable[Key]) -> None:
        """A lookup got these keys from memory."""
        with self._lock:
            self._write_later(self._reuse.used(keys))

    def promote(self, parent: Key | None, keys: Sequence[Key], told: Callable[[int, bool], None]) -> Promotion | None:
        """Begin to read the leading keys that are on disk but not in memory, as far as memory has room.

        `told` is called from other threads, with the number of leading blocks in memory, and whether no more will come.
        """
        known = [] if self._file is None else self._table.known(keys)
        if not known:
            return None
        # A chain belongs to the tenant of its first block.
        reservation = self._directory.reserve(parent, known, self._table.tenant_of(known[0]))
        if reservation is None:
            return None
        # Another lookup may be reading some of the blocks. Keep only those before the first such block.
        count = next((each for each, index in enumerate(reservation.wanted) if index != each), len(reservation.wanted))
        self._directory.abandon(reservation.blocks[count:])
        if not count:
            return None
        promotion = Promotion(told, reservation.blocks[:count], known[:count], [False] * count)
        for index in range(count):
            self._readers.submit(self._read, promotion, index)
        return promotion

    def release(self, promotion: Promotion) -> list[Key]:
        """No lookup waits for it any more; blocks being read still get into memory. Returns the used keys."""
        with self._lock:
            promotion.over = True
            blocks, promotion.leased = promotion.leased, []
        self._directory.release(blocks)
        return list(promotion.keys[: promotion.ready])

    def _open(self, layers: int, block_bytes: int) -> None:
        try:
            # One more buffer, for writes.
            file = BlockFile(self._path, layers, block_bytes, self._config.bytes, self._config.threads + 1)
        except (OSError, TooSmall) as error:
            fields = {"file": str(self._path), "error": str(error)}
            _log.warning("no disk tier: blocks are kept in memory alone", extra={"fields": fields})
            self._without_file = True
            return
        with self._lock:
            self._reuse.remembered += file.slots
        self._file = file
        with span("kvstore.disk_recovery", slots=file.slots):
            for slot in range(file.slots):
                if self._closing:
                    return
                self._table.found(slot, self._content_of(file, slot))
                if slot % RECOVERY_NEWS == RECOVERY_NEWS - 1:
                    self._changed()
        self._changed()
        found = {"file": str(self._path), "blocks": file.slots, "recovered": len(self._table)}
        _log.info("disk tier ready", extra={"fields": found})

    def _content_of(self, file: BlockFile, slot: int) -> Content | None:
        try:
            return file.content_of(slot)
        except OSError as error:
            self._failed("read", error)
            return None

    def _read(self, promotion: Promotion, index: int) -> None:
        read = False
        try:
            read = not promotion.over and self._read_block(promotion.keys[index], promotion.blocks[index])
        finally:
            self._end_read(promotion, index, read)

    def _read_block(self, key: Key, block: int) -> bool:
        """Read a block from disk. Returns whether memory holds it now."""
        file, macs = self._file, self._macs
        assert file is not None and macs is not None
        slot = self._table.begin_read(key) if self._breaker.allows() else None
        if slot is None:
            return False
        damaged = False
        try:
            with span("kvstore.disk_read"):
                macs[block] = file.read(slot, key, self._memory.block(block))
        except DamagedBlock:
            damaged = True
            KVSTORE_DISK_BLOCKS.labels("damaged").inc()
            return False
        except OSError as error:
            damaged = True
            self._failed("read", error)
            return False
        finally:
            self._table.end_read(key, damaged)
        self._breaker.succeeded()
        KVSTORE_DISK_BLOCKS.labels("read").inc()
        return True

    def _end_read(self, promotion: Promotion, index: int, read: bool) -> None:
        block = promotion.blocks[index]
        with self._lock:
            awaited = not promotion.over
            if read:
                self._directory.store([block], leased=awaited)
            else:
                self._directory.abandon([block])
            if not awaited:
                return
            if read:
                promotion.leased.append(block)
                promotion.done[index] = True
                while promotion.ready < len(promotion.done) and promotion.done[promotion.ready]:
                    promotion.ready += 1
            promotion.over = not read
            ready, over = promotion.ready, promotion.over
        promotion.told(ready, over)
        # Keys read from disk are published already, and the removal of what they displaced can wait for the last one.
        if over or ready == len(promotion.done):
            self._changed()

    def _write_later(self, keys: Iterable[Key]) -> None:
        for key in keys:
            # If memory turns over faster than the disk can write, only a part is worth writing. Keys that come while
            # the file is being opened wait for that.
            if self._without_file or len(self._waiting) >= self._directory.total_blocks:
                return
            if key not in self._waiting and not self._table.has(key):
                self._waiting.add(key)
                self._writer.submit(self._write, key)

    def _write(self, key: Key) -> None:
        with self._lock:
            self._waiting.discard(key)
        usable = self._file is not None and self._breaker.allows()
        block = self._directory.lease(key) if usable else None
        if block is None:
            return
        try:
            self._write_block(key, block)
        finally:
            self._directory.release([block], used=False)

    def _write_block(self, key: Key, block: int) -> None:
        file, macs = self._file, self._macs
        assert file is not None and macs is not None
        content = Content(key, self._directory.tenant_of(block), self._directory.parent_of(block))
        slot = self._table.begin_write(content)
        if slot is None:
            return
        written = False
        try:
            with span("kvstore.disk_write"):
                file.write(slot, content, self._memory.block(block), macs[block])
            written = True
        except OSError as error:
            self._failed("write", error)
        finally:
            self._table.end_write(key, slot, written)
        if written:
            self._breaker.succeeded()
            KVSTORE_DISK_BLOCKS.labels("written").inc()

    def _failed(self, what: str, error: OSError) -> None:
        self._breaker.failed()
        KVSTORE_DISK_BLOCKS.labels(f"{what} failed").inc()
        fields = {"what": what, "file": str(self._path), "error": str(error)}
        _log.warning("the disk tier failed", extra={"fields": fields})
