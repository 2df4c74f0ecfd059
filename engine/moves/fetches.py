"""Requests that wait for cached prefix from a KV store."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.blocks.kv_pool import BlockPool
from engine.moves.landings import DraftParts
from engine.requests.request import Request
from mesh.observe.spans import span
from transfer.events import Fetched

if TYPE_CHECKING:
    from transfer.agent import TransferAgent


@dataclass(frozen=True, slots=True)
class _Fetch:
    request: Request
    blocks: Sequence[int]
    move: span


class Fetches:
    """Holds every fetch's blocks until the agent answers, even if the request ends first."""

    def __init__(self, agent: "TransferAgent", pool: BlockPool, draft_layers: int, drafts: DraftParts) -> None:
        """draft_layers: of this rank's KV."""
        self._agent = agent
        self._draft_layers = draft_layers
        self._drafts = drafts
        self._pool = pool
        self._open: dict[int, _Fetch] = {}
        # The id of the fetch that a request waits for, by the request's key.
        self._awaited: dict[int, int] = {}
        self._begun = 0

    @property
    def open(self) -> int:
        return len(self._open)

    @property
    def awaited(self) -> int:
        return len(self._awaited)

    def begin(self, request: Request) -> None:
        """Ask for the blocks after those that the request found in the pool, as far as the store may have them."""
        assert request.fetch is not None
        held, end = request.progress.registered_blocks, min(request.fetch.blocks, request.matchable_blocks)
        blocks = list(request.progress.block_ids[held:end])
        self._pool.acquire(blocks)
        fetch_id, self._begun = self._begun, self._begun + 1
        move = span("engine.fetch", store_id=request.fetch.store_id, blocks=len(blocks)).begin(request.stages.context)
        self._open[fetch_id] = _Fetch(request, blocks, move)
        self._awaited[request.key] = fetch_id
        hashes = request.full_block_hashes(end)[held:]
        self._agent.fetch(fetch_id, request.fetch.store_id, hashes, blocks, move.context)

    def give_up(self, request_key: int) -> None:
        """The request has ended and waits no longer. The fetch goes on."""
        self._awaited.pop(request_key, None)

    def on_fetched(self, event: Fetched) -> Request | None:
        """The request that waited for this fetch, unless it has ended."""
        fetch = self._open.pop(event.fetch_id)
        self._pool.release(fetch.blocks)
        answered_ms = None if event.answered_seconds is None else round(event.answered_seconds * 1e3, 3)
        fetch.move.end(fetched_blocks=event.blocks, answered_ms=answered_ms)
        request = fetch.request
        if self._awaited.get(request.key) != event.fetch_id:
            return None
        del self._awaited[request.key]
        if self._draft_layers:
            first = request.progress.registered_blocks + event.drafted
            self._drafts.lacking(request.progress, first, fetch.blocks[event.drafted : event.blocks])
        return request
