"""Orders blocks of KV by their prompts: from a block that a rank holds back to the root of its chain."""

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from mesh.blocks import iter_chain
from mesh.domain.sparse_prefill import SparsePrefill


class Chains:
    """The reusable blocks that a rank holds, each with its parent, the block before it."""

    def __init__(self) -> None:
        # The parent of each block; empty for the first block of a chain.
        self._parents: dict[bytes, bytes] = {}
        # The tenant whose request computed a chain's first block, by that block; absent if it had no tenant.
        self._tenants: dict[bytes, str] = {}
        # Blocks whose draft layers are incomplete.
        self._draftless: set[bytes] = set()

    def observe(
        self,
        stored: Sequence[bytes],
        parents: Sequence[bytes],
        removed: Iterable[bytes],
        tenants: Mapping[bytes, str] | None = None,
        draftless: Iterable[bytes] = (),
    ) -> None:
        """Note first the blocks that left, then those that were added: each with its parent, the tenants of those that
        begin a chain, and those of them whose draft layers are incomplete.
        """
        for block_hash in removed:
            self._parents.pop(block_hash, None)
            self._tenants.pop(block_hash, None)
            self._draftless.discard(block_hash)
        self._parents.update(zip(stored, parents, strict=True))
        self._tenants.update(tenants or {})
        self._draftless.update(draftless)

    def drafts_end(self, chain: Sequence[bytes]) -> int | None:
        """Index of the chain's first block with incomplete draft layers; None if there is none."""
        if not self._draftless:
            return None
        return next((index for index, block_hash in enumerate(chain) if block_hash in self._draftless), None)

    def __len__(self) -> int:
        return len(self._parents)

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self._parents

    def tenant_of(self, chain: Sequence[bytes]) -> str:
        """The tenant whose request computed the chain's first block; empty if none."""
        return self._tenants.get(chain[0], "")

    def newest(self, most: int) -> list[list[bytes]]:
        """Up to `most` whole chains: those whose last block was added most recently."""
        followed = set(self._parents.values())
        return self.ending_in([block_hash for block_hash in self._parents if block_hash not in followed][-most:])

    def ending_in(self, blocks: Sequence[bytes]) -> list[list[bytes]]:
        """The whole chains, root first, that end in one of the blocks.

        A block with a successor among the given blocks ends no chain of its own; chains with a gap are left out.
        """
        followed = {self._parents.get(block_hash) for block_hash in blocks}
        chains = (self._chain(block_hash) for block_hash in blocks if block_hash not in followed)
        return [chain for chain in chains if chain]

    def _chain(self, block_hash: bytes) -> list[bytes]:
        """The chain up to this block; empty if it has a gap."""
        backwards = []
        while block_hash:
            parent = self._parents.get(block_hash)
            if parent is None:
                return []
            backwards.append(block_hash)
            block_hash = parent
        return backwards[::-1]


class Found(NamedTuple):
    """What a rank holds of a prompt."""

    # Leading blocks in its pool, and blocks after these in its host memory.
    cached: int = 0
    hosted: int = 0


class Holding(Protocol):
    """The blocks of one rank, by their hashes."""

    @property
    def chains(self) -> Container[bytes]:
        """Those of its pool."""
        ...

    @property
    def hosted(self) -> Container[bytes]:
        """Those in its host memory."""
        ...


def found_blocks(
    token_ids: Sequence[int], cache_salt: bytes, ranks: Sequence[Holding], sparse: SparsePrefill | None = None
) -> list[Found]:
    """How much of the prompt each rank holds: a prefix in its pool first, which host memory may continue."""
    found = [Found()] * len(ranks)
    matching = list(range(len(ranks)))
    for index, content in enumerate(iter_chain(token_ids, cache_salt, sparse)):
        for rank in matching:
            cached, hosted = found[rank]
            if cached == index and content in ranks[rank].chains:
                found[rank] = Found(cached + 1, 0)
            elif content in ranks[rank].hosted:
                found[rank] = Found(cached, hosted + 1)
        matching = [rank for rank in matching if sum(found[rank]) > index]
        if not matching:
            break
    return found
