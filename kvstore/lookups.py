"""Lookups as they arrive over UCX, on the transfer thread: sessions become namespaces, and chains become blocks."""

from collections.abc import Sequence

from kvstore.directory import Directory
from kvstore.keys import keys_of
from mesh.metrics import KVSTORE_LOOKUPS, KVSTORE_MATCHED_BLOCKS


class Lookups:
    """The store's `transfer.agent.LookupHandler`. `open` and `close` are called from the service's own thread."""

    def __init__(self, directory: Directory) -> None:
        self.lookups = 0
        # Lookups that found at least one block.
        self.hits = 0
        self._directory = directory
        self._digests: dict[int, bytes] = {}
        self._hit, self._miss = KVSTORE_LOOKUPS.labels("hit"), KVSTORE_LOOKUPS.labels("miss")

    def open(self, session_id: int, digest: bytes) -> None:
        """This session's blocks are those of the namespace with that digest."""
        self._digests[session_id] = digest

    def close(self, session_id: int) -> None:
        self._digests.pop(session_id, None)

    def match(self, session_id: int, hashes: Sequence[bytes]) -> list[int]:
        """Blocks of the longest stored prefix, leased until `release`; none for a session that has ended."""
        digest = self._digests.get(session_id)
        blocks = [] if digest is None else self._directory.match(keys_of(digest, hashes))
        self.lookups += 1
        if blocks:
            self.hits += 1
            self._hit.inc()
            KVSTORE_MATCHED_BLOCKS.inc(len(blocks))
        else:
            self._miss.inc()
        return blocks

    def release(self, session_id: int, blocks: Sequence[int]) -> None:
        """The blocks were sent, or will not be."""
        self._directory.release(blocks)
