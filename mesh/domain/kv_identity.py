"""What makes two blocks of KV the same: the definition that workers and stores share.

A block's key is `KvNamespace.digest` and its chain hash. Equal keys mean KV that may stand in for each other:

- The chain hash (`mesh.blocks`) says which tokens: those of the block and all before them, from which position on they
  were computed with sparse attention, and with which setting. Its root is the tenant's salt, so tenants share no block.
- The namespace says what the bytes mean: the digest of the weights and of their configuration (or the name that the
  workers declare instead), the KV's dtype and its scale, the order of elements, and how many layers and tokens a block
  has.
- Draft layers are a part of their own: the digest covers the base layers alone, and a block that also has draft layers
  has a second key (`kvstore.keys`). Only workers with equally many draft layers exchange those.

How products were rounded is no part of it: KV that differs by rounding alone may be shared. docs/kv-transfer.md says
the same to operators, and tests/kvstore/test_identity.py compares all pairs of unlike workers on one store.
"""

import hashlib

import msgspec

from mesh.blocks import BLOCK_TOKENS

DIGEST_BYTES = 8


class KvNamespace(msgspec.Struct, frozen=True, cache_hash=True):
    """What cached KV bytes mean, for a block's base layers and for the draft layers after them, if there are any.

    Base layers may move between workers with the same `base`; draft layers only if both have equally many of them.
    """

    # Digest of the weights that made the KV.
    weights_fingerprint: str
    dtype: str
    # All layers, draft layers included.
    layers: int
    layout: str
    scale: float = 1.0
    block_tokens: int = BLOCK_TOKENS
    # How many of `layers`, the last ones, are draft layers; only workers with drafts have them.
    draft_layers: int = 0

    @property
    def base(self) -> "KvNamespace":
        """The base layers alone."""
        return msgspec.structs.replace(self, layers=self.layers - self.draft_layers, draft_layers=0)

    @property
    def digest(self) -> bytes:
        """DIGEST_BYTES, the same in every process and for all namespaces with the same base."""
        fields = msgspec.structs.asdict(self.base)
        # Stores of the previous version do not know this field, and share an index with this one.
        del fields["draft_layers"]
        return hashlib.blake2b(
            msgspec.msgpack.encode(fields), digest_size=DIGEST_BYTES, person=b"kv-namespace"
        ).digest()

    def provides(self, other: "KvNamespace") -> bool:
        """Whether blocks of this namespace contain all that blocks of `other` do. `other` may lack the draft layers."""
        return other.draft_layers in (0, self.draft_layers) and self.shares_base(other)

    def shares_base(self, other: "KvNamespace") -> bool:
        """Whether the base layers of both mean the same, so that KV may move between their workers."""
        return self == other or self.base == other.base

    def differences(self, other: "KvNamespace") -> str:
        """The differences of their base layers, in words; empty if KV may move between their workers."""
        ours, theirs = msgspec.structs.asdict(self.base), msgspec.structs.asdict(other.base)
        return ", ".join(
            f"{field} {value} against {theirs[field]}" for field, value in ours.items() if value != theirs[field]
        )
