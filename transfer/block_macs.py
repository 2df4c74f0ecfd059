"""MACs of blocks that pass through a store. They prove who computed a block, with a key that workers hold and stores do
not.

The MAC of one layer of a block covers the KV namespace, the block's hash, the layer, the bytes and the writer. It is
GMAC (NIST SP 800-38D): a polynomial hash over GF(2^128), hidden by AES-256. Within one push, each part of a block (base
layers, draft layers) has its own AES key and the layer is the nonce, so no nonce is used twice. The key of base layers
does not depend on draft layers, so workers with and without drafts can verify each other's blocks.
"""

import hashlib
import hmac
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from mesh.domain.kv_identity import KvNamespace
from transfer.segments import Tile
from transfer.ticket import BlockMac

SALT_BYTES = 16
TAG_BYTES = 16
KEY_ID_BYTES = 8
# Reasons for refusing a store's blocks.
WRONG_BLOCK_MAC = "wrong_block_mac"
UNKNOWN_BLOCK_KEY = "unknown_block_key"
_NONCE_BYTES = 12

# The pieces of a tile's blocks as a segment holds them, layer-major: piece (layer, block).
Pieces = Sequence[memoryview]


class MacSource(Protocol):
    """Supplies the MACs for an outgoing transfer."""

    def macs_of(self, tile: Tile, pieces: Callable[[], Pieces]) -> tuple[BlockMac | None, ...]:
        """The MAC of each block of the tile; None for a block that came without one."""
        ...


class MacSink(Protocol):
    """Handles the MACs of an incoming transfer."""

    def refusal(self, tile: Tile, macs: Sequence[BlockMac | None], pieces: Callable[[], Pieces]) -> str | None:
        """Why the tile's blocks may not be kept; None if they may."""
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

    def tags(
        self, block_hash: bytes, writer: str, salt: bytes, first_layer: int, pieces: Sequence[memoryview]
    ) -> bytes:
        """Tags of a block's pieces in consecutive layers."""
        # The salt and the hash have fixed lengths, so the concatenation is unambiguous.
        named = salt + block_hash + writer.encode()
        base = pieces[: max(self._base_layers - first_layer, 0)]
        first_draft = first_layer + len(base)
        return _tags(self._base, named, first_layer, base) + _tags(
            self._drafts, named, first_draft, pieces[len(base) :]
        )


@dataclass(frozen=True)
class Writing:
    """A push to a store, signed by this worker as the one that computed the blocks."""

    key: NamespaceKey
    writer: str
    hashes: Sequence[bytes]
    salt: bytes

    def macs_of(self, tile: Tile, pieces: Callable[[], Pieces]) -> tuple[BlockMac, ...]:
        staged = pieces()
        return tuple(
            BlockMac(
                self.writer,
                self.salt,
                self.key.tags(block_hash, self.writer, self.salt, tile.first_layer, staged[index :: tile.block_count]),
                self.key.key_id,
            )
            for index, block_hash in enumerate(_hashes_of(tile, self.hashes))
        )


@dataclass(frozen=True)
class Checking:
    """A fetch from a store: only blocks that a worker of the namespace computed for these hashes are accepted."""

    # One key for every accepted secret.
    keys: Sequence[NamespaceKey]
    hashes: Sequence[bytes]

    def refusal(self, tile: Tile, macs: Sequence[BlockMac | None], pieces: Callable[[], Pieces]) -> str | None:
        if len(macs) != tile.block_count:
            return WRONG_BLOCK_MAC
        staged = pieces()
        for index, (block_hash, mac) in enumerate(zip(_hashes_of(tile, self.hashes), macs, strict=True)):
            if mac is None or len(mac.salt) != SALT_BYTES:
                return WRONG_BLOCK_MAC
            keys = [key for key in self.keys if mac.key_id in (key.key_id, b"")]
            if not keys:
                return UNKNOWN_BLOCK_KEY
            own = staged[index :: tile.block_count]
            tags = (key.tags(block_hash, mac.writer, mac.salt, tile.first_layer, own) for key in keys)
            if not any(hmac.compare_digest(tag, mac.tags) for tag in tags):
                return WRONG_BLOCK_MAC
        return None


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


def _tags(part_key: bytes, named: bytes, first_layer: int, pieces: Sequence[memoryview]) -> bytes:
    if not pieces:
        return b""
    key = AESGCM(hashlib.blake2b(named, key=part_key, digest_size=32, person=b"dm-kv-block").digest())
    return b"".join(
        key.encrypt(layer.to_bytes(_NONCE_BYTES, "little"), b"", piece)
        for layer, piece in enumerate(pieces, first_layer)
    )


def _hashes_of(tile: Tile, hashes: Sequence[bytes]) -> Sequence[bytes]:
    return hashes[tile.first_block : tile.first_block + tile.block_count]
