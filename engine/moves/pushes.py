"""KV that leaves the pool: of prompts computed for a decode worker, and of blocks offered to a store."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.blocks.kv_pool import BlockPool
from engine.pace.smoothing import SmoothedRatio
from engine.requests.request import Request
from mesh.blocks import BLOCK_TOKENS
from mesh.errors import InvalidRequest, NamespaceMismatch
from mesh.observe.spans import span
from transfer.events import PushEnded
from transfer.ticket import Ticket

if TYPE_CHECKING:
    from transfer.agent import TransferAgent

# Weight of the past against one more push.
PUSH_DECAY = 0.9
# The time of a smaller push is mostly its way there and back.
LEAST_PUSH_BYTES = 1 << 20


@dataclass(slots=True, eq=False)
class _OpenPush:
    ticket: Ticket
    # None if the blocks are offered to a store.
    request: Request | None = None
    # Both None until the request is admitted.
    blocks: Sequence[int] | None = None
    move: span | None = None


class Pushes:
    """Holds every push's blocks until the agent reports that nothing reads them, even if the request ends first.

    Prompts of at least `layerwise_tokens` tokens are pushed while they are computed: a chunk's blocks, layer by layer.
    """

    def __init__(self, agent: "TransferAgent", pool: BlockPool, layers: int, layerwise_tokens: int) -> None:
        self._agent = agent
        self._pool = pool
        self._layers = layers
        self._layerwise_tokens = layerwise_tokens
        self._bytes_per_second = SmoothedRatio()
        # All pushes by transfer id; those of requests that are not cancelled also by the request's key.
        self._open: dict[bytes, _OpenPush] = {}
        self._by_key: dict[int, _OpenPush] = {}

    @property
    def open(self) -> int:
        """How many pushes hold blocks."""
        return sum(push.blocks is not None for push in self._open.values())

    @property
    def bytes_per_second(self) -> float | None:
        """Smoothed pace of prompts' pushes that began once the prompt was computed; None while unknown."""
        return self._bytes_per_second.value

    def expect(self, request: Request) -> None:
        """The request will push when it is admitted. Raises InvalidRequest if its ticket is in use."""
        assert request.push is not None
        ticket = request.push.ticket
        if ticket.transfer_id in self._open:
            raise InvalidRequest("the ticket is in use: open a landing for each request", field="ticket")
        self._open[ticket.transfer_id] = self._by_key[request.key] = _OpenPush(ticket, request)

    def begin(self, request: Request) -> None:
        """Start the push of an admitted request, with the KV that is in its blocks already.

        Raises InvalidRequest or NamespaceMismatch if the ticket is not for these blocks.
        """
        assert request.push is not None
        push = self._by_key[request.key]
        self._start(push, list(request.progress.block_ids[request.push.held_blocks :]))
        self.on_computed(request, request.progress.computed)

    def offer(self, ticket: Ticket, hashes: Sequence[bytes]) -> PushEnded | None:
        """Push blocks into a store's landing. If that is impossible (a block is gone, the ticket is unfit), say why."""
        blocks = self._pool.match_prefix(hashes)
        try:
            if len(blocks) < len(hashes):
                raise InvalidRequest("the blocks were evicted before the store asked for them")
            if ticket.transfer_id in self._open:
                raise InvalidRequest("the ticket is in use: open a landing for each offer", field="ticket")
            if ticket.namespace.draft_layers and self._pool.drafts_end(blocks) is not None:
                raise InvalidRequest("the draft layers of these blocks are not whole: offer them without")
            self._start(_OpenPush(ticket), blocks, hashes)
        except (InvalidRequest, NamespaceMismatch) as error:
            return PushEnded(ticket.transfer_id, 0, "", error.message)
        self._agent.ready(ticket.transfer_id, self._layers, len(blocks))
        return None

    def on_computed(self, request: Request, tokens: int) -> None:
        """The KV of the request's first `tokens` tokens is written in all layers."""
        push = self._by_key.get(request.key)
        if push is not None and (self._is_layerwise(request) or tokens >= request.prompt_tokens):
            self._report(push, request, self._layers, tokens)

    def layer_watch(self, ends: Iterable[tuple[Request, int]]) -> Callable[[int], None] | None:
        """See `Transfers.layer_watch`."""
        watched = [
            (push, request, end)
            for request, end in ends
            if (push := self._by_key.get(request.key)) is not None and self._is_layerwise(request)
        ]

        def report(layers: int) -> None:
            for push, request, end in watched:
                self._report(push, request, layers, end)

        return report if watched else None

    def cancel(self, request_key: int) -> None:
        """Stop the push of a request, whether that waits, runs or has ended."""
        push = self._by_key.pop(request_key, None)
        if push is None:
            return
        if push.blocks is None:
            del self._open[push.ticket.transfer_id]
        else:
            self._agent.cancel_push(push.ticket.transfer_id)

    def on_ended(self, ended: PushEnded) -> None:
        push = self._open.pop(ended.transfer_id)
        assert push.blocks is not None and push.move is not None
        push.move.end(size_bytes=ended.size_bytes, transport=ended.transport)
        self._pool.release(push.blocks)
        # Offers do not count: a store takes segments at its leisure, a decode worker does not.
        if push.request is not None and ended.seconds and ended.size_bytes >= LEAST_PUSH_BYTES:
            self._bytes_per_second.observe(ended.size_bytes, ended.seconds, PUSH_DECAY)
        if push.request is not None and self._by_key.get(push.request.key) is push:
            del self._by_key[push.request.key]

    def _start(self, push: _OpenPush, blocks: Sequence[int], offered: Sequence[bytes] | None = None) -> None:
        self._agent.push(push.ticket, blocks, offered)
        self._pool.acquire(blocks)
        push.blocks = blocks
        under = None if push.request is None else push.request.stages.context
        push.move = span("engine.push", blocks=len(blocks)).begin(under)
        self._open[push.ticket.transfer_id] = push

    def _is_layerwise(self, request: Request) -> bool:
        return request.prompt_tokens >= self._layerwise_tokens

    def _report(self, push: _OpenPush, request: Request, layers: int, tokens: int) -> None:
        assert push.blocks is not None and request.push is not None
        # When the prompt is computed its last block is complete, though not full.
        whole = tokens >= request.prompt_tokens
        blocks = len(push.blocks) if whole else tokens // BLOCK_TOKENS - request.push.held_blocks
        if blocks > 0:
            self._agent.ready(push.ticket.transfer_id, layers, blocks)
