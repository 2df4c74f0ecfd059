"""The messages between a service process and its rank: msgspec frames over a Unix socket, nothing pickled.

Service to rank: one Start, then Submit and Cancel at any time, and Stop at the end. After a Release the rank keeps its
weights, says Released as its last word, and waits for another Start. FirstToken says what a prefill worker drew;
AttachStore, DetachStore and PushOffer concern the stores. A message that names a transfer or a request that has ended
is ignored: it crossed the message that reports the end. Found answers a LookUp.
Rank to service: one Ready (or Failed), then a StepResult after each step that has something to report, or when
transfers have. LandingOpened and PushEnded are for the service at the transfer's other end. With Publish and LookUp
ranks on several hosts find each other, before they are Ready.
"""

import msgspec

from engine.balance.report import BalanceReport
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.outputs import FinishReason, Logprobs, PromptLogprobs
from mesh.domain.requests import TokenRequest
from mesh.domain.targets import StoreTarget
from mesh.domain.workers import HostTierStatus, TransferCounters, WorkerLoad, WorkerSpeed
from transfer.block_macs import Authorship
from transfer.events import PushEnded
from transfer.ticket import StoreSession, Ticket


class Start(msgspec.Struct, tag="start"):
    # An engine.config.EngineConfig as JSON.
    config: bytes
    # A mesh.config.ObserveConfig as JSON; only that of the first Start counts.
    observe: bytes
    # Its number in the worker, which may be another than before if the worker has lost a host.
    rank: int
    # None if workers do not sign the blocks that they offer to stores.
    authorship: Authorship | None = None


class PushTarget(msgspec.Struct, frozen=True, array_like=True):
    """Where a prompt's KV goes: the landing that a decode worker opened, which begins after its `held_blocks`."""

    ticket: Ticket
    held_blocks: int


class Submit(msgspec.Struct, tag="submit"):
    # Chosen by the service; names the request between the two processes.
    key: int
    request: TokenRequest
    # A prefill worker computes the prompt: open a landing for its KV, and go on from FirstToken. If the pool turns out
    # to hold all of the prompt but its last block, it is computed here: its first output comes without a LandingOpened.
    remote_prefill: bool = False
    # The prefill worker sends no larger segments; None if they may be as large as ours.
    sender_slot_bytes: int | None = None
    # The draft layers that the prefill worker has; None if it has as many as this worker.
    sender_draft_layers: int | None = None
    # Compute the prompt and its first token only (max_tokens is 1), and push the KV there. A PushEnded follows, before
    # or after the last output, unless the request is refused, or cancelled while it waits.
    push: PushTarget | None = None
    fetch: StoreTarget | None = None


class FirstToken(msgspec.Struct, tag="first_token"):
    """To the receiving rank: a request with `remote_prefill` goes on after this token. The rank does not report it."""

    key: int
    token_id: int
    # See Progress.
    drafts_end: int | None = None


class AttachStore(msgspec.Struct, tag="attach_store"):
    session: StoreSession


class DetachStore(msgspec.Struct, tag="detach_store"):
    store_id: str


class PushOffer(msgspec.Struct, tag="push_offer"):
    """Push these blocks into the store's landing, or none if one of them is gone; PushEnded reports which."""

    ticket: Ticket
    hashes: list[bytes]


class Cancel(msgspec.Struct, tag="cancel"):
    """End the request, its landing and its push; the last may outlive the request, and is stopped then too."""

    key: int


class Stop(msgspec.Struct, tag="stop"):
    pass


class Release(msgspec.Struct, tag="release"):
    """Forget all requests, blocks and transfers, and wait for another Start, perhaps of another service."""


class Released(msgspec.Struct, tag="released"):
    """Nothing of the rank follows before its next Ready."""


class Publish(msgspec.Struct, tag="publish"):
    """For ranks on other hosts, which ask for the key."""

    key: str
    value: bytes


class LookUp(msgspec.Struct, tag="look_up"):
    """Found follows as soon as some rank has published the key; nothing else does before."""

    key: str


class Found(msgspec.Struct, tag="found"):
    value: bytes


class Ready(msgspec.Struct, tag="ready"):
    model: str
    namespace: KvNamespace
    context_tokens: int
    vocabulary_size: int
    total_blocks: int
    max_requests: int
    # One block of KV, all layers.
    block_bytes: int
    # Highest resident memory of the rank while it loaded.
    peak_bytes: int
    # UCX worker address; None without transfers.
    transfer_address: bytes | None = None
    # The largest segment that suits the rank; None without transfers.
    segment_bytes: int | None = None
    # The model's own ends of sequences.
    eos_token_ids: frozenset[int] = frozenset()
    # The device's name: a card's, "CPU" or "oracle".
    device_name: str = ""
    # Seconds of each phase of the rank's start, in order.
    start_seconds: dict[str, float] = {}
    # None if it was not measured.
    speed: WorkerSpeed | None = None
    # Whether the rank can serve in another group with what it has loaded, if another host of its worker is lost.
    can_regroup: bool = False
    # What there is of its host memory by now; None if it keeps no blocks there.
    host_tier: HostTierStatus | None = None


class Failed(msgspec.Struct, tag="failed"):
    """The rank could not start; it exits after this."""

    reason: str
    message: str


class Refusal(msgspec.Struct, array_like=True):
    """Why the engine did not take a request: a reason of mesh.errors, and a sentence."""

    reason: str
    message: str


class Output(msgspec.Struct, array_like=True):
    """What one step brought for one request; or what a prefill worker brought: its first token.

    Exactly one output of a request has `finish` or `refusal`, and it is the last.
    """

    key: int
    # Position of token_ids[0], prompt included.
    first_position: int
    token_ids: list[int]
    logprobs: list[Logprobs] | None = None
    # With the request's first token: prompt tokens found in a cache, here or where they were computed.
    cached_tokens: int | None = None
    finish: FinishReason | None = None
    # Why the request ended: it can never run here, and this is its only output; or PREFILL_LOST, if its KV did not
    # land, perhaps after its first token.
    refusal: Refusal | None = None
    # With cached_tokens: how many of them came from a store.
    store_cached_tokens: int | None = None
    # Whether some of token_ids were accepted in place of other, drawn tokens: then the seed alone does not determine
    # them.
    relaxed: bool = False
    # With the request's first token: log probabilities of its prompt's own tokens, if they were asked for.
    prompt_logprobs: PromptLogprobs | None = None
    # With the request's first token: see Progress.
    drafts_end: int | None = None
    # With cached_tokens: how many of them came from the rank's host memory.
    host_cached_tokens: int | None = None


class DraftCounts(msgspec.Struct, array_like=True):
    """Drafts that steps verified. The first of each list is the draft right after a drawn token."""

    verified: list[int]
    # A draft after a wrong one is not accepted.
    accepted: list[int]
    # How many accepted drafts differ from the tokens drawn in their places.
    relaxed: int = 0
    # Rows of decoding requests that yielded one token, two, ...
    yields: list[int] = []


class LandingOpened(msgspec.Struct, tag="landing_opened"):
    """The request's blocks are reserved: send the prompt to the prefill worker, with this ticket."""

    key: int
    ticket: Ticket
    held_blocks: int


class SparseMeasure(msgspec.Struct, frozen=True, array_like=True):
    """What sparse attention kept of one chunk, in one layer."""

    # Which share of the exact attention was kept: the mean over the heads and some of the queries.
    recall: float
    # Which share of the blocks that exact attention computes was computed.
    density: float


class StepResult(msgspec.Struct, tag="step"):
    step: int
    outputs: list[Output]
    load: WorkerLoad
    # Content-addressed blocks that became reusable, and that were evicted, in this step.
    stored_blocks: list[bytes] = []
    # For each of `stored_blocks`, the block before it in its chain; empty at the root.
    stored_parents: list[bytes] = []
    removed_blocks: list[bytes] = []
    transfers: TransferCounters | None = None
    # Drafts verified since the last result; None if there were none.
    drafts: DraftCounts | None = None
    # As of the ranks' last look; None if experts stay where they are.
    balance: BalanceReport | None = None
    # Those of `stored_blocks` whose draft layers are not whole: see Progress.drafts_end.
    draftless_blocks: list[bytes] = []
    # For stored blocks that begin a chain of a tenant's: the tenant whose request computed it.
    stored_tenants: dict[bytes, str] = {}
    sparse: list[SparseMeasure] = []
    # Blocks that came to host memory, and that were evicted from it; reusable blocks may be there too.
    hosted_blocks: list[bytes] = []
    unhosted_blocks: list[bytes] = []


ToRank = Start | Submit | Cancel | Stop | Release | FirstToken | AttachStore | DetachStore | PushOffer | Found
TransferNews = LandingOpened | PushEnded
FromRank = Ready | Failed | Publish | LookUp | Released | StepResult | TransferNews
