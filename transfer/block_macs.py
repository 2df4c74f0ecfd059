"""MACs of blocks that pass through a store. They prove who computed a block, with a key that workers hold and stores do
not.

The MAC of one layer of a block covers the KV namespace, the block's hash, the layer, the bytes and the writer. It is
GMAC (`transfer.gmac`). Within one push, each part of a block (base layers, draft layers) has its own AES key and the
layer is the nonce, so no nonce is used twice. The key of base layers does not depend on draft layers, so workers with
and without drafts can verify each other's blocks.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple, Protocol

import msgspec

from mesh.domain.kv_identity import KvNamespace
from transfer.gmac import KEY_BYTES
from transfer.memory import Check, KeyedPieces
from transfer.segments import Tile
from transfer.ticket import BlockMac

SALT_BYTES = 16
KEY_ID_BYTES = 8
# Reasons for refusing a store's blocks.
WRONG_BLOCK_MAC = "wrong_block_mac"
UNKNOWN_BLOCK_KEY = "unknown_block_key"

# Computes the tags of pieces that a segment holds.
Tags = Callable[[Sequence[KeyedPieces]], Sequence[bytes]]


class MacSource(Protocol):
    """Supplies the MACs for an outgoing transfer."""

    def macs_of(self, tile: Tile, tags: Tags) -> tuple[BlockMac | None, ...]:
        """The MAC of each block of the tile; None for a block that came without one."""
        ...


class MacSink(Protocol):
    """Handles the MACs of an incoming transfer."""

    def check(self, tile: Tile, macs: Sequence[BlockMac | None]) -> Check | str:
        """What is to be checked of the tile's blocks, or why they may not be kept."""
        ...


class Authorship(msgspec.Struct, frozen=True):
    """What a worker signs and checks blocks with."""

    # The same for all workers of the mesh.
    secret: bytes
    # This worker's id.
    writer: str
    # Secrets that other workers may have signed with, while the secret is being replaced.
    accepted_secrets: tuple[bytes, ...] = ()


class NamespaceKey:
    """The keys of one KV namespace, derived from the workers' secret: one for base layers and one for draft layers.
    `key_id` identifies the secret without revealing it.
    """

    def __init__(self, secret: bytes, namespace: KvNamespace) -> None:
        root = hashlib.blake2b(secret, digest_size=32, person=b"dm-kv-secret").digest()
        self._base_layers = namespace.base.layers
        self._base, self._drafts = (
            hashlib.blake2b(msgspec.msgpack.encode(part), key=root, digest_size=32, person=b"dm-kv-namespace").digest()
            for part in (namespace.base, namespace)
        )
        self.key_id = hashlib.blake2b(key=root, digest_size=KEY_ID_BYTES, person=b"dm-kv-key-id").digest()

    def keyed(self, block: int, block_hash: bytes, writer: str, salt: bytes, tile: Tile) -> list[KeyedPieces]:
        """The keys of a block's pieces in the tile's layers. block: its number within the tile."""
        # The salt and the hash have fixed lengths, so the concatenation is unambiguous.
        named = salt + block_hash + writer.encode()
        base = min(max(self._base_layers - tile.first_layer, 0), tile.layer_count)
        parts = (
            (self._base, tile.first_layer, base),
            (self._drafts, tile.first_layer + base, tile.layer_count - base),
        )
        return [KeyedPieces(block, first, layers, _key(part, named)) for part, first, layers in parts if layers]


@dataclass(frozen=True)
class Writing:
    """A push to a store, signed by this worker as the one that computed the blocks."""

    key: NamespaceKey
    writer: str
    hashes: Sequence[bytes]
    salt: bytes

    def macs_of(self, tile: Tile, tags: Tags) -> tuple[BlockMac, ...]:
        blocks = [
            self.key.keyed(block, block_hash, self.writer, self.salt, tile)
            for block, block_hash in enumerate(_hashes_of(tile, self.hashes))
        ]
        made = iter(tags([pieces for block in blocks for pieces in block]))
        return tuple(
            BlockMac(self.writer, self.salt, b"".join(islice(made, len(block))), self.key.key_id) for block in blocks
        )


@dataclass(frozen=True)
class Checking:
    """A fetch from a store: only blocks that a worker of the namespace computed for these hashes are accepted."""

    # One key for every accepted secret.
    keys: Sequence[NamespaceKey]
    hashes: Sequence[bytes]

    def check(self, tile: Tile, macs: Sequence[BlockMac | None]) -> Check | str:
        if len(macs) != tile.block_count:
            return WRONG_BLOCK_MAC
        keyed: list[KeyedPieces] = []
        blocks: list[_Expected] = []
        for block, (block_hash, mac) in enumerate(zip(_hashes_of(tile, self.hashes), macs, strict=True)):
            if mac is None or len(mac.salt) != SALT_BYTES:
                return WRONG_BLOCK_MAC
            keys = [key for key in self.keys if mac.key_id in (key.key_id, b"")]
            if not keys:
                return UNKNOWN_BLOCK_KEY
            candidates = [key.keyed(block, block_hash, mac.writer, mac.salt, tile) for key in keys]
            keyed += [pieces for each in candidates for pieces in each]
            blocks.append(_Expected(mac.tags, [len(each) for each in candidates]))
        return Check(keyed, partial(_refusal, blocks))


class Author:
    """Signs this worker's blocks, and checks those of other workers of its namespace."""

    def __init__(self, authorship: Authorship, namespace: KvNamespace) -> None:
        # The worker's own key comes first.
        self._keys = [NamespaceKey(secret, namespace) for secret in (authorship.secret, *authorship.accepted_secrets)]
        self._writer = authorship.writer

    def writes(self, hashes: Sequence[bytes]) -> Writing:
        """The signer for one push of these blocks."""
        return Writing(self._keys[0], self._writer, hashes, secrets.token_bytes(SALT_BYTES))

    def checks(self, hashes: Sequence[bytes]) -> Checking:
        return Checking(self._keys, hashes)


class _Expected(NamedTuple):
    """A block's tags, and how many `KeyedPieces` it has for each key that they may have been made with."""

    tags: bytes
    candidates: Sequence[int]


def _refusal(blocks: Sequence[_Expected], tags: Sequence[bytes]) -> str | None:
    made = iter(tags)
    for block in blocks:
        found = [b"".join(islice(made, count)) for count in block.candidates]
        if not any(hmac.compare_digest(each, block.tags) for each in found):
            return WRONG_BLOCK_MAC
    return None


def _key(part_key: bytes, named: bytes) -> bytes:
    return hashlib.blake2b(named, key=part_key, digest_size=KEY_BYTES, person=b"dm-kv-block").digest()


def _hashes_of(tile: Tile, hashes: Sequence[bytes]) -> Sequence[bytes]:
    return hashes[tile.first_block : tile.first_block + tile.block_count]
