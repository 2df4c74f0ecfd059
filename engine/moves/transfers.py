"""The KV that moves in and out of this rank's pool.

A request first reads what host memory has of its prefix, and then waits for what other processes send, if it still
lacks any.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, cast

from engine.blocks.kv_pool import BlockPool
from engine.moves.fetches import Fetches
from engine.moves.host_reads import HostReads
from engine.moves.host_tier import HostTier
from engine.moves.landings import DraftParts, PromptLandings
from engine.moves.pushes import Pushes
from engine.protocol.messages import AttachStore, DetachStore, PushOffer, Submit, TransferNews
from engine.requests.request import Request
from mesh.blocks import BLOCK_TOKENS
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.workers import TransferCounters
from mesh.errors import InvalidRequest, PrefillLost
from transfer.config import TransferConfig
from transfer.events import Event, Fetched, Landed, LandingFailed, PushEnded

if TYPE_CHECKING:
    from transfer.agent import TransferAgent

TransferMessage = AttachStore | DetachStore | PushOffer


class Transfers:
    """Between the engine and the agent that moves bytes: which request a transfer is for, and what its end means.

    A transfer holds its blocks in addition to the request's own hold, so that a request can end at any time while the
    agent still reads or writes them. Without an agent nothing moves, and `check` refuses requests that need transfers.
    """

    def __init__(
        self,
        agent: "TransferAgent | None",
        pool: BlockPool,
        namespace: KvNamespace,
        config: TransferConfig,
        clear_drafts: Callable[[Sequence[int]], None],
        host: HostTier | None = None,
    ) -> None:
        """namespace: of this rank's KV; clear_drafts: empties the draft layers of blocks; host: KV in host memory, None
        if none is kept there.
        """
        self._agent = agent
        # None is never used: `check` lets no request in that would begin a transfer.
        used = cast("TransferAgent", agent)
        drafts = DraftParts(clear_drafts)
        self._landings = PromptLandings(used, pool, config, namespace.draft_layers, drafts)
        self._pushes = Pushes(used, pool, namespace.layers, config.layerwise_tokens)
        self._fetches = Fetches(used, pool, namespace.draft_layers, drafts)
        self._host_reads = None if host is None else HostReads(host, pool)
        # Requests whose wait is over; with an error if their KV is not coming.
        self._arrived: list[tuple[Request, PrefillLost | None]] = []
        self._news: list[TransferNews] = []
        self._reported = TransferCounters()

    @property
    def awaited(self) -> int:
        """How many requests hold blocks and take part in no step until their KV is there."""
        reads = 0 if self._host_reads is None else self._host_reads.awaited
        return self._landings.awaited + self._fetches.awaited + reads

    @property
    def open(self) -> int:
        """How many transfers hold blocks."""
        return self._landings.open + self._pushes.open + self._fetches.open + self.open_reads

    @property
    def open_reads(self) -> int:
        """How many reads from host memory are under way. Nothing but `poll` notices their ends."""
        return 0 if self._host_reads is None else self._host_reads.open

    @property
    def arriving(self) -> Collection[bytes]:
        """Contents that are being read from host memory."""
        return () if self._host_reads is None else self._host_reads.arriving

    @property
    def can_resume(self) -> bool:
        """Whether requests that waited can go on."""
        return bool(self._arrived) or (self._host_reads is not None and self._host_reads.done)

    @property
    def push_bytes_per_second(self) -> float | None:
        """Smoothed pace of prompts' pushes; None while unknown."""
        return self._pushes.bytes_per_second

    @property
    def changed(self) -> bool:
        """Whether `poll_counters` has something to report."""
        return self._agent is not None and self._agent.counters() != self._reported

    @property
    def has_news(self) -> bool:
        """Whether the next step goes on with requests that waited, tells the service something, or feeds a push."""
        return bool(self.can_resume or self._news or self._pushes.open)

    @property
    def settled(self) -> bool:
        """Whether nothing is open here or in the counters last reported, and these show every staging slot as free."""
        last = self._reported
        open_transfers = self.open + last.open_landings + last.open_pushes + last.open_fetches
        return not open_transfers and last.free_slots == last.total_slots

    def check(self, submit: Submit) -> None:
        """Raises InvalidRequest if the request needs a transfer that is not possible."""
        if self._agent is None and (submit.remote_prefill or submit.push or submit.fetch):
            raise InvalidRequest("this worker moves no KV: configure engine.transfer")
        if submit.push is None:
            return
        if submit.remote_prefill or submit.request.stop.max_tokens != 1:
            raise InvalidRequest("a prompt that is pushed is computed here, and one token is drawn", field="push")
        if not 0 <= submit.push.held_blocks * BLOCK_TOKENS < len(submit.request.token_ids):
            raise InvalidRequest("held_blocks leaves nothing to push", field="held_blocks")

    def expect(self, request: Request) -> None:
        """Note that the request is queued. Raises InvalidRequest if its ticket is in use."""
        if request.push is not None:
            self._pushes.expect(request)

    def would_wait(self, request: Request, held_blocks: int) -> bool:
        """Whether a request that finds `held_blocks` blocks in this rank's memory waits for KV from elsewhere."""
        if request.remote_prefill:
            # The last block alone is computed sooner than a prefill worker has computed the prompt.
            return not held_blocks or held_blocks < request.matchable_blocks
        return request.fetch is not None and held_blocks < min(request.fetch.blocks, request.matchable_blocks)

    def read_host(self, request: Request, hosted: Sequence[bytes]) -> None:
        """The request is admitted and has its blocks: read these contents, which are pinned for it, from host memory.
        `begin` follows once they are read.
        """
        assert self._host_reads is not None
        self._host_reads.begin(request, hosted)

    def begin(self, request: Request, waits: bool) -> None:
        """The request is admitted, and has its blocks and what this rank's memory had of its prefix. Raises
        InvalidRequest or NamespaceMismatch for a bad ticket.
        """
        if request.push is not None:
            self._pushes.begin(request)
        if waits and request.remote_prefill:
            self._news.append(self._landings.begin(request))
        elif waits:
            self._fetches.begin(request)
        # If it is preempted later, it computes what it lost itself.
        request.remote_prefill, request.fetch = False, None

    def awaiting_first_token(self, request_key: int) -> Request | None:
        return self._landings.awaiting_first_token(request_key)

    def on_first_token(self, request: Request) -> None:
        """The request has its first token."""
        self._note_landed(self._landings.pop_complete(request.key))

    def layer_watch(self, ends: Iterable[tuple[Request, int]]) -> Callable[[int], None] | None:
        """A function to call while a step runs, each time its first n layers are written; None if no push needs it.

        `ends`: the step's requests, each with the number of its tokens whose KV is written after the step.
        """
        return self._pushes.layer_watch(ends) if self._pushes.open else None

    def on_computed(self, request: Request, tokens: int) -> None:
        self._pushes.on_computed(request, tokens)

    def give_up(self, request: Request) -> None:
        """The request has ended, and waits for nothing. Its push goes on."""
        self._landings.give_up(request.key)
        self._fetches.give_up(request.key)

    def cancel_push(self, request_key: int) -> None:
        self._pushes.cancel(request_key)

    def handle(self, message: TransferMessage) -> None:
        """Carry out a message that the service passes on."""
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
        """Note what the agent reports. Returns whether it reported anything."""
        events = [] if self._agent is None else self._agent.events()
        for event in events:
            self._on_event(event)
        read = self._host_reads is not None and self._host_reads.poll()
        return bool(events) or read

    def drain_arrived(self) -> list[tuple[Request, PrefillLost | None]]:
        """Requests that can go on, or that cannot, with the error. Some may have ended since."""
        arrived, self._arrived = self._arrived, []
        return arrived

    def drain_read(self) -> list[Request]:
        """Requests whose reads from host memory have ended. Some may have ended since."""
        return [] if self._host_reads is None else self._host_reads.drain()

    def drain_news(self) -> list[TransferNews]:
        news, self._news = self._news, []
        return news

    def poll_counters(self) -> TransferCounters | None:
        """The agent's counters, if they changed since the last call."""
        counters = self._reported if self._agent is None else self._agent.counters()
        if counters == self._reported:
            return None
        self._reported = counters
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
        found = request.progress.registered_blocks * BLOCK_TOKENS + tokens
        request.progress.landed(found)
        request.cached_tokens = found
        request.store_cached_tokens = tokens
        self._pushes.on_computed(request, found)
        self._arrived.append((request, None))
