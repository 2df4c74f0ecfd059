"""Which KV block is whose. The bytes themselves belong to the backend."""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from engine.blocks.host_blocks import Evicted


class ReleaseOrder:
    """A queue of blocks, each in it once at most, from which any can be taken; 8 bytes for each of `blocks`."""

    def __init__(self, blocks: int) -> None:
        # A ring of links. One more index than there are blocks stands for both of the queue's ends.
        self._end = blocks
        self._earlier = array("i", [blocks]) * (blocks + 1)
        self._later = array("i", [blocks]) * (blocks + 1)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, block: int) -> None:
        """Put the block at the end."""
        end = self._end
        last = self._earlier[end]
        self._earlier[block], self._later[block] = last, end
        self._later[last] = self._earlier[end] = block
        self._count += 1

    def take(self, block: int) -> None:
        """Remove a block that is in the queue."""
        earlier, later = self._earlier[block], self._later[block]
        self._later[earlier], self._earlier[later] = later, earlier
        self._count -= 1

    def first(self, most: int) -> Iterator[int]:
        """Up to `most` blocks from the queue's beginning. It must not change meanwhile."""
        block = self._later[self._end]
        while most and block != self._end:
            yield block
            block, most = self._later[block], most - 1

    def take_first(self) -> int:
        """Remove and return the block that was added before all others."""
        block = self._later[self._end]
        assert block != self._end
        self.take(block)
        return block


class BlockChanges(msgspec.Struct, frozen=True):
    """Net change of the pool's reusable content since it was last asked."""

    stored: list[bytes]
    removed: list[bytes]
    # For each stored content, the one before it in its chain; empty at the root.
    parents: list[bytes] = []
    # Those of `stored` whose draft layers are not whole.
    draftless: list[bytes] = []
    # The tenant whose request computed it, for stored content that begins a chain; requests without a tenant have none.
    tenants: dict[bytes, str] = {}


class BlockPool:
    """Reference counts and content addresses of `total_blocks` blocks.

    A block is held (references above 0), cached (no references, content still addressable, evicted least recently used
    first) or blank. Two held blocks may have equal content; only the first to fill is addressable. What is addressable
    may have draft layers that are not whole: see `engine.requests.progress.Progress.drafts_end`.
    """

    def __init__(self, total_blocks: int, on_evicted: Callable[[Sequence[Evicted]], None] | None = None) -> None:
        """on_evicted: called before blocks lose their content to others. The backend still has their KV."""
        self.total_blocks = total_blocks
        self._on_evicted = on_evicted
        self._references = [0] * total_blocks
        self._hashes: list[bytes | None] = [None] * total_blocks
        # For blocks with content: the content before it in its chain, and how many are before it.
        self._parents: list[bytes] = [b""] * total_blocks
        self._indices = array("i", [0]) * total_blocks
        self._block_by_hash: dict[bytes, int] = {}
        # Addressable content whose draft layers are not whole.
        self._draftless: set[bytes] = set()
        # Blocks from this one on were never taken.
        self._fresh = 0
        # Other blocks without content; the one given back last is taken first.
        self._blank: list[int] = []
        # A simulated fleet has millions of blocks: a dict of them would take 80 bytes each.
        self._cached = ReleaseOrder(total_blocks)
        # Stored content in order, with its parent.
        self._stored: dict[bytes, bytes] = {}
        # The tenant of stored content, by content.
        self._tenants: dict[bytes, str] = {}
        # An insertion-ordered set.
        self._removed: dict[bytes, None] = {}

    @property
    def free_blocks(self) -> int:
        """Blocks that no request or transfer holds, cached ones included."""
        return self.blank_blocks + len(self._cached)

    @property
    def blank_blocks(self) -> int:
        """How many blocks can be allocated before cached ones are evicted."""
        return self.total_blocks - self._fresh + len(self._blank)

    def next_evicted(self, most: int) -> list[Evicted]:
        """Up to `most` of the cached blocks, those first that would be evicted first."""
        return [self._content_of(block) for block in self._cached.first(most)]

    @property
    def references(self) -> Sequence[int]:
        """Holders of each block, by block id. A view: read it, and do not keep it over a change."""
        return self._references

    def can_allocate(self, count: int) -> bool:
        return count <= self.free_blocks

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks with no content; cached blocks are evicted once no blank ones are left."""
        assert self.can_allocate(count)
        evicted: list[Evicted] = []
        blocks = [self._blank.pop() if self._blank else self._next(evicted) for _ in range(count)]
        if evicted and self._on_evicted is not None:
            self._on_evicted(evicted)
        for block in blocks:
            self._references[block] = 1
        return blocks

    def match_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest known prefix of a hash chain. Takes no reference."""
        blocks = []
        for content in hashes:
            block = self._block_by_hash.get(content)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def drafts_end(self, blocks: Sequence[int]) -> int | None:
        """The first of these addressable blocks whose draft layers are not whole; None if all are."""
        if not self._draftless:
            return None
        return next((index for index, block in enumerate(blocks) if self._hashes[block] in self._draftless), None)

    def free_among(self, blocks: Iterable[int]) -> int:
        """How many of these blocks are free: what acquiring them takes from `free_blocks`."""
        return sum(not self._references[block] for block in blocks)

    def acquire(self, blocks: Iterable[int]) -> None:
        """Hold blocks found by `match_prefix`, or once more blocks that are held."""
        for block in blocks:
            if self._references[block] == 0:
                assert self._hashes[block] is not None
                self._cached.take(block)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each. Later blocks of a prefix are evicted before the ones they depend on."""
        for block in reversed(blocks):
            assert self._references[block] > 0
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._hashes[block] is None:
                self._blank.append(block)
            else:
                self._cached.add(block)

    def register(
        self, block: int, content: bytes, parent: bytes = b"", draftless: bool = False, tenant: str = "", index: int = 0
    ) -> None:
        """Make a held, full block addressable, unless another with that content already is.

        `parent` is the content before it in its chain; empty at the root, where `tenant` counts. `draftless`: its draft
        layers are not whole. `index`: how many blocks of its chain are before it.
        """
        assert self._references[block] > 0
        assert self._hashes[block] is None
        if content in self._block_by_hash:
            return
        self._hashes[block] = content
        self._parents[block], self._indices[block] = parent, index
        self._block_by_hash[content] = block
        if draftless:
            self._draftless.add(content)
        if content in self._removed:
            del self._removed[content]
            return
        self._stored[content] = parent
        if tenant and not parent:
            self._tenants[content] = tenant

    def drain_changes(self) -> BlockChanges:
        """What became addressable, and what ceased to be, since the last call."""
        draftless = [content for content in self._stored if content in self._draftless] if self._draftless else []
        stored, parents = list(self._stored), list(self._stored.values())
        changes = BlockChanges(stored, list(self._removed), parents, draftless, dict(self._tenants))
        self._stored.clear()
        self._tenants.clear()
        self._removed.clear()
        return changes

    def _next(self, evicted: list[Evicted]) -> int:
        """A block without content: one that was never taken, or else the cached one released first, which is noted in
        `evicted`.
        """
        if self._fresh == self.total_blocks:
            evicted.append(self._evict())
            return evicted[-1].block
        self._fresh += 1
        return self._fresh - 1

    def _evict(self) -> Evicted:
        block = self._cached.take_first()
        evicted = self._content_of(block)
        content = evicted.content
        del self._block_by_hash[content]
        self._hashes[block] = None
        self._draftless.discard(content)
        if content in self._stored:
            del self._stored[content]
            self._tenants.pop(content, None)
        else:
            self._removed[content] = None
        return evicted

    def _content_of(self, block: int) -> Evicted:
        content = self._hashes[block]
        assert content is not None
        return Evicted(block, content, self._parents[block], self._indices[block], content in self._draftless)
