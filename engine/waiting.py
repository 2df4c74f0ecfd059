"""Requests that hold no blocks yet, in order of admission."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace

from engine.request import Request
from engine.standing import ALONE, Standing
from mesh.domain.sparse_prefill import sparse_part

_Entry = tuple[int, int, int, int, int, Request]


class WaitingQueue:
    """A tenant's requests are ordered by priority, then by arrival batch, by tokens to compute (as estimated on
    entry), and by arrival.
    """

    def __init__(self) -> None:
        # By tenant. `arrival` is unique, so the first four elements decide every comparison.
        self._entries: dict[str, list[_Entry]] = {}
        self._entry_by_key: dict[int, _Entry] = {}
        # Sum of the estimates, and how many of these tokens will be attended to sparsely.
        self.tokens = 0
        self.sparse_tokens = 0
        # Free blocks that admitting all of them takes, as estimated on entry.
        self.blocks = 0

    def __len__(self) -> int:
        return len(self._entry_by_key)

    def __contains__(self, request: Request) -> bool:
        return request.key in self._entry_by_key

    def in_order(self, standing: Standing) -> Iterator[Request]:
        """The tenant that was served least goes first; among equals the one that holds least. A request that was
        yielded counts as served and held for those behind it.
        """
        if standing is ALONE:
            return (entry[-1] for entries in self._entries.values() for entry in entries)
        return self._interleaved(standing)

    def add(self, request: Request, uncached_tokens: int, blocks: int) -> None:
        batch, position = request.arrival
        entry = (request.share.priority, batch, uncached_tokens, position, blocks, request)
        insort(self._entries.setdefault(request.share.tenant, []), entry)
        self._entry_by_key[request.key] = entry
        self.tokens += uncached_tokens
        self.blocks += blocks
        self.sparse_tokens += _sparse_tokens(entry)

    def remove(self, request: Request) -> None:
        entry = self._entry_by_key.pop(request.key)
        entries = self._entries[request.share.tenant]
        del entries[bisect_left(entries, entry)]
        if not entries:
            del self._entries[request.share.tenant]
        self.tokens -= entry[2]
        self.blocks -= entry[4]
        self.sparse_tokens -= _sparse_tokens(entry)

    def _interleaved(self, standing: Standing) -> Iterator[Request]:
        heads = [(*standing.of(tenant), tenant, 0) for tenant in self._entries]
        heapify(heads)
        while heads:
            served, held, tenant, index = heads[0]
            _, _, tokens, _, _, request = self._entries[tenant][index]
            yield request
            if index + 1 < len(self._entries[tenant]):
                heapreplace(heads, (served + (tokens + 1) / request.share.weight, held + 1, tenant, index + 1))
            else:
                heappop(heads)


def _sparse_tokens(entry: _Entry) -> int:
    """How many of the entry's tokens will be attended to sparsely. They are the last ones of the prompt."""
    *_, tokens, _, _, request = entry
    if not tokens or request.sparse_from is None:
        return 0
    end = len(request.progress.token_ids)
    return sparse_part(end - tokens, end, request.sparse_from)
