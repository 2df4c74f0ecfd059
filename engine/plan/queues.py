"""Requests that hold no blocks yet, in order of admission, and requests that take part in steps."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heapreplace
from typing import NamedTuple

from engine.plan.tenants import ALONE, TenantStanding
from engine.requests.request import Request
from mesh.domain.sparse_prefill import sparse_part


class Running:
    """Requests with one token left to compute decode; the others are prompts.

    A request whose last token is in flight is in neither list, and no step takes it on again.
    """

    def __init__(self) -> None:
        self.decoding: list[Request] = []
        self.prompts: list[Request] = []

    @property
    def prompt_tokens(self) -> int:
        """Tokens left to compute in prompts."""
        return sum(request.progress.left for request in self.prompts)

    @property
    def sparse_tokens(self) -> int:
        """How many of the `prompt_tokens` will be attended to sparsely."""
        return sum(
            sparse_part(request.progress.computed_at_most, request.progress.tokens_at_most, request.sparse_from)
            for request in self.prompts
        )

    def add(self, request: Request) -> None:
        (self.decoding if request.progress.left == 1 else self.prompts).append(request)

    def remove(self, request: Request) -> None:
        """Take the request out of the steps, if it is in them."""
        for running in (self.prompts, self.decoding):
            if request in running:
                running.remove(request)

    def sort(self) -> None:
        """After a launch: computed prompts begin to decode, and requests whose last token is in flight leave."""
        running = [request for request in (*self.decoding, *self.prompts) if not request.will_end]
        self.decoding = [request for request in running if request.progress.left == 1]
        self.prompts = [request for request in running if request.progress.left > 1]


class _Entry(NamedTuple):
    """Entries are compared as tuples. No two requests have equal positions, so the fields before it and the position
    decide.
    """

    priority: int
    batch: int
    # Prompt tokens to compute here, as estimated on entry.
    uncached_tokens: int
    position: int
    # Free blocks that admitting it takes, as estimated on entry.
    blocks: int
    request: Request

    @property
    def sparse_tokens(self) -> int:
        """How many of the tokens will be attended to sparsely. They are the last ones of the prompt."""
        if not self.uncached_tokens or self.request.sparse_from is None:
            return 0
        end = len(self.request.progress.token_ids)
        return sparse_part(end - self.uncached_tokens, end, self.request.sparse_from)


class WaitingQueue:
    """A tenant's requests are ordered by priority, then by arrival batch, by tokens to compute (as estimated on
    entry), and by arrival.
    """

    def __init__(self) -> None:
        # By tenant.
        self._entries: dict[str, list[_Entry]] = {}
        self._entry_by_key: dict[int, _Entry] = {}
        # Sum of the estimates; and how many of these tokens will attend sparsely.
        self.tokens = 0
        self.sparse_tokens = 0
        # Free blocks that admitting all of them takes, as estimated on entry.
        self.blocks = 0

    def __len__(self) -> int:
        return len(self._entry_by_key)

    def __contains__(self, request: Request) -> bool:
        return request.key in self._entry_by_key

    def in_order(self, standing: TenantStanding) -> Iterator[Request]:
        """The tenant that was served least goes first; among equals the one that holds least. A request that was
        yielded counts as served and held for those after it.
        """
        if standing is ALONE:
            return (entry.request for entries in self._entries.values() for entry in entries)
        return self._interleaved(standing)

    @property
    def longest_next(self) -> int:
        """The most prompt tokens of those that are next among their tenants' requests."""
        return max((entries[0].uncached_tokens for entries in self._entries.values()), default=0)

    def add(self, request: Request, uncached_tokens: int, blocks: int) -> None:
        batch, position = request.arrival
        entry = _Entry(request.share.priority, batch, uncached_tokens, position, blocks, request)
        insort(self._entries.setdefault(request.share.tenant, []), entry)
        self._entry_by_key[request.key] = entry
        self.tokens += uncached_tokens
        self.blocks += blocks
        self.sparse_tokens += entry.sparse_tokens

    def remove(self, request: Request) -> None:
        entry = self._entry_by_key.pop(request.key)
        entries = self._entries[request.share.tenant]
        del entries[bisect_left(entries, entry)]
        if not entries:
            del self._entries[request.share.tenant]
        self.tokens -= entry.uncached_tokens
        self.blocks -= entry.blocks
        self.sparse_tokens -= entry.sparse_tokens

    def _interleaved(self, standing: TenantStanding) -> Iterator[Request]:
        heads = [(*standing.of(tenant), tenant, 0) for tenant in self._entries]
        heapify(heads)
        while heads:
            served, held, tenant, index = heads[0]
            entry = self._entries[tenant][index]
            tokens, request = entry.uncached_tokens, entry.request
            yield request
            if index + 1 < len(self._entries[tenant]):
                heapreplace(heads, (served + (tokens + 1) / request.share.weight, held + 1, tenant, index + 1))
            else:
                heappop(heads)
