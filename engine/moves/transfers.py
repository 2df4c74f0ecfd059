"""What this rank's requests move in and out of its KV pool."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

from engine.kv_pool import BlockPool
from engine.load import LoadMeter
from engine.moves.fetches import Fetches
from engine.moves.landings import Landings
from engine.moves.pushes import Pushes
from engine.protocol.messages import AttachStore, DetachStore, PushOffer, Submit, TransferNews
from engine.request import Request
from mesh.blocks import BLOCK_TOKENS
from mesh.domain.workers import TransferCounters
from mesh.errors import InvalidRequest, PrefillLost
from transfer.config import TransferConfig
from transfer.events import Event, Fetched, Landed, LandingFailed, PushEnded

if TYPE_CHECKING:
    from transfer.agent import TransferAgent

TransferMessage = AttachStore | DetachStore | PushOffer


class Transfers:
    """Between the engine and the agent that moves bytes: which transfer is whose, and what its end means.

    Blocks of a transfer are held beside the request's own hold, so that a request can end at any time while the agent
    still reads or writes them. Without an agent nothing moves, and `check` refuses what would.
    """

    def __init__(
        self,
        agent: "TransferAgent | None",
        pool: BlockPool,
        layers: int,
        config: TransferConfig,
        meter: LoadMeter,
    ) -> None:
        self._agent = agent
        # Not called without one: no request begins a transfer that `check` has not let in.
        used = cast("TransferAgent", agent)
        self._landings = Landings(used, pool, config.landing_seconds)
        self._pushes = Pushes(used, pool, layers, config.layerwise_tokens, meter)
        self._fetches = Fetches(used, pool)
        # Requests whose wait is over, with the error where their KV is not coming.
        self._arrived: list[tuple[Request, PrefillLost | None]] = []
        self._news: list[TransferNews] = []
        self._told = TransferCounters()

    @property
    def awaited(self) -> int:
        """Requests that hold blocks, and take part in no step before their KV is there."""
        return self._landings.awaited + self._fetches.awaited

    @property
    def open(self) -> int:
        """Transfers that hold blocks."""
        return self._landings.open + self._pushes.open + self._fetches.open

    @property
    def changed(self) -> bool:
        """Whether `poll_counters` has something to tell."""
        return self._agent is not None and self._agent.counters() != self._told

    @property
    def settled(self) -> bool:
        """Whether nothing is open, was as last told, and every staging slot was free."""
        told = self._told
        open_transfers = self.open + told.open_landings + told.open_pushes + told.open_fetches
        return not open_transfers and told.free_slots == told.total_slots

    def check(self, submit: Submit) -> None:
        """Raises InvalidRequest where what the request would move cannot be moved."""
        if self._agent is None and (submit.remote_prefill or submit.push or submit.fetch):
            raise InvalidRequest("this worker moves no KV: configure engine.transfer")
        if submit.push is None:
            return
        if submit.remote_prefill or submit.request.stop.max_tokens != 1:
            raise InvalidRequest("a prompt that is pushed is computed here, and one token is drawn", field="push")
        if not 0 <= submit.push.held_blocks * BLOCK_TOKENS < len(submit.request.token_ids):
            raise InvalidRequest("held_blocks leaves nothing to push", field="held_blocks")

    def expect(self, request: Request) -> None:
        """A request is queued. Raises InvalidRequest where its ticket is in use."""
        if request.push is not None:
            self._pushes.expect(request)

    def would_wait(self, request: Request, held_blocks: int) -> bool:
        """Whether a request that finds so much in the pool waits for KV from elsewhere."""
        if request.remote_prefill:
            # The last block alone is computed sooner than a prefill worker has computed the prompt.
            return not held_blocks or held_blocks < request.matchable_blocks
        return request.fetch is not None and held_blocks < min(request.fetch.blocks, request.matchable_blocks)

    def begin(self, request: Request, waits: bool) -> None:
        """A request is admitted and has its blocks. Raises InvalidRequest and NamespaceMismatch for a bad ticket."""
        if request.push is not None:
            self._pushes.begin(request)
        if waits and request.remote_prefill:
            self._news.append(self._landings.begin(request))
        elif waits:
            self._fetches.begin(request)
        # When it is preempted later, what it lost is computed here.
        request.remote_prefill, request.fetch = False, None

    def awaiting_first_token(self, request_key: int) -> Request | None:
        return self._landings.awaiting_first_token(request_key)

    def on_first_token(self, request: Request) -> None:
        """It was appended to the request, which has not ended with it."""
        self._note_landed(self._landings.pop_complete(request.key))

    def layer_watch(self, ends: Iterable[tuple[Request, int]]) -> Callable[[int], None] | None:
        """What to call while a step runs, with how many layers of it are written; None where nobody waits for layers.

        `ends`: the step's requests, and how many tokens of each it leaves written.
        """
        return self._pushes.layer_watch(ends) if self._pushes.open else None

    def on_computed(self, request: Request, tokens: int) -> None:
        self._pushes.on_computed(request, tokens)

    def give_up(self, request: Request) -> None:
        """It has ended, and waits for nothing. Its push goes on."""
        self._landings.give_up(request.key)
        self._fetches.give_up(request.key)

    def cancel_push(self, request_key: int) -> None:
        self._pushes.cancel(request_key)

    def handle(self, message: TransferMessage) -> None:
        """What the service passes on."""
        if self._agent is None:
            return
        match message:
            case AttachStore():
                self._agent.attach_store(message.session)
            case DetachStore():
                self._agent.detach_store(message.store_id)
            case PushOffer():
                ended = self._pushes.offer(message.ticket, message.hashes)
                if ended is not None:
                    self._news.append(ended)

    def poll(self) -> bool:
        """Take what the agent tells. Whether it told anything."""
        events = [] if self._agent is None else self._agent.events()
        for event in events:
            self._on_event(event)
        return bool(events)

    def drain_arrived(self) -> list[tuple[Request, PrefillLost | None]]:
        """Requests that can go on, their progress noted, or (with the error) cannot. Some may have ended since."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def drain_news(self) -> list[TransferNews]:
        news, self._news = self._news, []
        return news

    def poll_counters(self) -> TransferCounters | None:
        """The agent's, if they changed since the last call."""
        counters = self._told if self._agent is None else self._agent.counters()
        if counters == self._told:
            return None
        self._told = counters
        return counters

    def _on_event(self, event: Event) -> None:
        match event:
            case Landed():
                self._note_landed(self._landings.on_landed(event.transfer_id))
            case LandingFailed():
                request = self._landings.on_failed(event.transfer_id)
                if request is not None:
                    self._arrived.append((request, PrefillLost(event.message)))
            case Fetched():
                request = self._fetches.on_fetched(event)
                if request is not None:
                    self._note_fetched(request, event.blocks * BLOCK_TOKENS)
            case PushEnded():
                self._pushes.on_ended(event)
                self._news.append(event)

    def _note_landed(self, request: Request | None) -> None:
        if request is not None:
            request.progress.landed(request.prompt_tokens)
            self._arrived.append((request, None))

    def _note_fetched(self, request: Request, tokens: int) -> None:
        progress = request.progress
        progress.landed(progress.computed + tokens)
        request.cached_tokens = progress.computed
        request.store_cached_tokens = tokens
        self._pushes.on_computed(request, progress.computed)
        self._arrived.append((request, None))
