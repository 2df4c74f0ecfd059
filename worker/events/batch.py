"""KV events as plain data, in the terms of vLLM's `vllm.distributed.kv_events`, which llm-d and Dynamo read too."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

# Media, as vLLM and Dynamo name them: a rank's pool, wherever it lies, and the host memory under it.
POOL, HOST = "GPU", "CPU"


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks that follow one another in a chain, in its order."""

    hashes: Sequence[bytes]
    # The block before the first; empty at the root, and if it is unknown.
    parent: bytes
    # The tokens of all blocks, one after the other, 4 bytes each (little-endian); empty if unknown or not told.
    tokens: bytes
    # Digest of the tenant's cache salt (`mesh.blocks.root_hash`); empty if it is unknown.
    root: bytes
    medium: str

    @property
    def named(self) -> int:
        """How many blocks it names."""
        return len(self.hashes)


@dataclass(frozen=True, slots=True)
class Removed:
    hashes: Sequence[bytes]
    medium: str

    @property
    def named(self) -> int:
        return len(self.hashes)


@dataclass(frozen=True, slots=True)
class Cleared:
    """Whatever was told before is void."""

    named = 0


Event: TypeAlias = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class Batch:
    """Events of one rank. Those of one sequence number are applied together, in order."""

    sequence: int
    # Seconds since the epoch (time.time).
    seconds: float
    rank: int
    events: Sequence[Event]
    # Whether it is a part of a snapshot, and whether further parts follow.
    snapshot: bool = False
    more: bool = False

    @property
    def blocks(self) -> int:
        """How many hashes it names."""
        return sum(event.named for event in self.events)
