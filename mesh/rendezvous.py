"""Chooses which of several KV stores keeps a chain; all who know the same stores agree without communicating."""

import hashlib
from collections.abc import Iterable


def rendezvous(store_ids: Iterable[str], root: bytes) -> str | None:
    """The store for the chains that begin with block hash `root`; None if there are no stores.

    It is the store with the highest score for the root, so that a store that comes or goes moves only its own chains
    (highest random weight: Thaler and Ravishankar, "Using name-based mappings to increase hit rates", 1998).
    """
    return max(store_ids, key=lambda store_id: (_score(store_id, root), store_id), default=None)


def _score(store_id: str, root: bytes) -> bytes:
    return hashlib.blake2b(root, digest_size=8, key=hashlib.sha256(store_id.encode()).digest()).digest()
