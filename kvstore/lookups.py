"""Handles lookups as they arrive over UCX, on the transfer thread: maps sessions to namespaces, and chains to
blocks.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

from kvstore.directory import BlockDirectory
from kvstore.disk.tier import DiskTier, Promotion
from kvstore.keys import keys_of
from mesh.observe.metrics import KVSTORE_LOOKUPS, KVSTORE_MATCHED_BLOCKS
from transfer.fetch.lookup_server import Found

# Called with the session, the sequence, the number of leading blocks in memory, and whether no more will come.
BlocksRead: TypeAlias = Callable[[int, int, int, bool], None]


def _nothing_read(session_id: int, sequence: int, ready: int, over: bool) -> None:
    """The default without a disk, where it is never called."""


class Lookups:
    """The store's `transfer.agent.LookupHandler`. The service's own thread calls `open` and `close`."""

    def __init__(
        self, directory: BlockDirectory, disk: DiskTier | None = None, read: BlocksRead = _nothing_read
    ) -> None:
        """`read`: called when blocks of an answer have come from the disk: see `TransferAgent.blocks_read`."""
        self.lookups = 0
        # Lookups that found at least one block.
        self.hits = 0
        self._directory = directory
        self._disk = disk
        self._read = read
        # Promotions of the answers in progress, by session and sequence.
        self._promotions: dict[tuple[int, int], Promotion] = {}
        self._digests: dict[int, bytes] = {}
        self._hit, self._miss = KVSTORE_LOOKUPS.labels("hit"), KVSTORE_LOOKUPS.labels("miss")

    def open(self, session_id: int, digest: bytes) -> None:
        """This session looks up blocks of the namespace with that digest."""
        self._digests[session_id] = digest

    def close(self, session_id: int) -> None:
        self._digests.pop(session_id, None)

    def match(self, session_id: int, sequence: int, hashes: Sequence[bytes]) -> Found:
        """The longest prefix, in memory and after that on disk; nothing for a session that has ended."""
        digest = self._digests.get(session_id)
        keys = [] if digest is None else keys_of(digest, hashes)
        blocks = self._directory.match(keys)
        ready = len(blocks)
        if self._disk is not None and ready < len(keys):
            parent = keys[ready - 1] if ready else None
            told = partial(self._blocks_read, session_id, sequence, ready)
            promotion = self._disk.promote(parent, keys[ready:], told)
            if promotion is not None:
                self._promotions[session_id, sequence] = promotion
                blocks += promotion.blocks
        self.lookups += 1
        if blocks:
            self.hits += 1
            self._hit.inc()
            KVSTORE_MATCHED_BLOCKS.inc(len(blocks))
        else:
            self._miss.inc()
        return Found(blocks, ready, self._directory.drafted(blocks))

    def release(self, session_id: int, sequence: int, blocks: Sequence[int]) -> None:
        """The blocks were sent, or will not be sent."""
        promotion = self._promotions.pop((session_id, sequence), None)
        in_memory = blocks if promotion is None else blocks[: len(blocks) - len(promotion.blocks)]
        if self._disk is None:
            self._directory.release(in_memory)
            return
        used = self._directory.keys_of(in_memory)
        self._directory.release(in_memory)
        if promotion is not None:
            used += self._disk.release(promotion)
        self._disk.used(used)

    def _blocks_read(self, session_id: int, sequence: int, in_memory: int, read: int, over: bool) -> None:
        self._read(session_id, sequence, in_memory + read, over)
