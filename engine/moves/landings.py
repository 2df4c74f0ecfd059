"""Requests whose prompt is computed elsewhere, from the opened landing until they can go on here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.blocks.kv_pool import BlockPool
from engine.protocol.messages import LandingOpened
from engine.requests.progress import Progress
from engine.requests.request import Request
from mesh.blocks import BLOCK_TOKENS, blocks_for
from transfer.config import TransferConfig

if TYPE_CHECKING:
    from transfer.agent import TransferAgent


class DraftParts:
    """Blocks serve as well without their draft layers, since guesses change no token: only the guesses get worse."""

    def __init__(self, clear: Callable[[Sequence[int]], None]) -> None:
        """clear: empties the draft layers of blocks, which hold what another request left there."""
        self._clear = clear

    def lacking(self, progress: Progress, first_block: int, block_ids: Sequence[int]) -> None:
        """These blocks have only base layers; the first is block `first_block` of the request's table."""
        if block_ids:
            self._clear(block_ids)
            progress.lack_drafts(first_block)


@dataclass(slots=True, eq=False)
class _PromptLanding:
    request: Request
    transfer_id: bytes
    blocks: Sequence[int]
    with_drafts: bool
    landed: bool = False


class PromptLandings:
    """Holds every landing's blocks until the agent reports that nothing writes to them, even if the request ends first.

    A request goes on once its KV has landed and its first token is known, in either order.
    """

    def __init__(
        self, agent: "TransferAgent", pool: BlockPool, config: TransferConfig, draft_layers: int, drafts: DraftParts
    ) -> None:
        """draft_layers: of this rank's KV."""
        self._agent = agent
        self._draft_layers = draft_layers
        self._drafts = drafts
        self._pool = pool
        self._config = config
        # PromptLandings that something may write to, by transfer id.
        self._open: dict[bytes, _PromptLanding] = {}
        # PromptLandings that a request waits for, by the request's key.
        self._awaited: dict[int, _PromptLanding] = {}

    @property
    def open(self) -> int:
        return len(self._open)

    @property
    def awaited(self) -> int:
        return len(self._awaited)

    def begin(self, request: Request) -> LandingOpened:
        """Open a landing for the blocks of the request's prompt, without those that it found in the pool."""
        held = request.progress.registered_blocks
        blocks = list(request.progress.block_ids[held : blocks_for(request.prompt_tokens)])
        self._pool.acquire(blocks)
        with_drafts = request.sender_draft_layers in (None, self._draft_layers)
        ticket = self._agent.open_landing(
            blocks,
            request.prompt_tokens,
            request.attempt,
            self._config.landing_seconds_for(request.prompt_tokens - held * BLOCK_TOKENS),
            request.sender_slot_bytes,
            with_drafts,
        )
        landing = _PromptLanding(request, ticket.transfer_id, blocks, with_drafts)
        self._open[ticket.transfer_id] = self._awaited[request.key] = landing
        return LandingOpened(request.key, ticket, held)

    def awaiting_first_token(self, request_key: int) -> Request | None:
        """The request with this key, if it waits for its first token."""
        landing = self._awaited.get(request_key)
        return None if landing is None or landing.request.has_first_token else landing.request

    def pop_complete(self, request_key: int) -> Request | None:
        """The request with this key, if all that it waits for is here; it then waits no longer."""
        landing = self._awaited.get(request_key)
        if landing is None or not landing.landed or not landing.request.has_first_token:
            return None
        del self._awaited[request_key]
        return landing.request

    def give_up(self, request_key: int) -> None:
        """The request has ended: stop its landing."""
        landing = self._awaited.pop(request_key, None)
        if landing is not None and not landing.landed:
            self._agent.cancel_landing(landing.transfer_id)

    def on_landed(self, transfer_id: bytes) -> Request | None:
        """The request that waited for this landing, if it waits for nothing else."""
        landing = self._close(transfer_id)
        landing.landed = True
        if not landing.with_drafts and self._awaited.get(landing.request.key) is landing:
            self._drafts.lacking(landing.request.progress, landing.request.progress.registered_blocks, landing.blocks)
        return self.pop_complete(landing.request.key)

    def on_failed(self, transfer_id: bytes) -> Request | None:
        """The request that waited for this landing, unless it has ended; it then waits no longer."""
        landing = self._close(transfer_id)
        if self._awaited.get(landing.request.key) is not landing:
            return None
        del self._awaited[landing.request.key]
        return landing.request

    def _close(self, transfer_id: bytes) -> _PromptLanding:
        landing = self._open.pop(transfer_id)
        self._pool.release(landing.blocks)
        return landing
