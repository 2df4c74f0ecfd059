"""A request's way from its Submit to the queue."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.backend import Backend
from engine.batch import History
from engine.config import EngineConfig
from engine.constraints.constraints import Constraints
from engine.protocol.messages import Submit
from engine.requests.progress import Progress
from engine.requests.request import PromptScores, Request, Stages
from engine.requests.thinking import ThinkingPhase, ThinkTokens
from mesh.blocks import BLOCK_TOKENS, root_hash
from mesh.domain.sampling import DraftUse, check_prompt_logprobs
from mesh.errors import ContextExceeded, InvalidConstraint, InvalidRequest, MeshError


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What every request must fit."""

    context_tokens: int
    vocabulary_size: int


def longest_context(backend: Backend) -> int:
    """Tokens of the longest request. One that is longer than the pool could never finish."""
    return min(backend.context_tokens, backend.total_blocks * BLOCK_TOKENS)


def check(submit: Submit, limits: RequestLimits) -> None:
    """Raises InvalidRequest. The gateway checks all this too, but a backend may end the rank on input beyond limits."""
    token_ids, max_tokens = submit.request.token_ids, submit.request.stop.max_tokens
    if not token_ids:
        raise InvalidRequest("the prompt is empty: send at least one token", field="prompt")
    if max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", field="max_tokens")
    if min(token_ids) < 0 or max(token_ids) >= limits.vocabulary_size:
        raise InvalidRequest(f"token ids must be from 0 to {limits.vocabulary_size - 1}", field="prompt")
    check_prompt_logprobs(submit.request.sampling, len(token_ids))
    total = len(token_ids) + max_tokens
    if total > limits.context_tokens:
        raise ContextExceeded(
            f"{len(token_ids)} prompt tokens and max_tokens {max_tokens} make {total}, and this"
            f" worker has room for {limits.context_tokens}: shorten the prompt or lower max_tokens"
        )


@dataclass(frozen=True, slots=True)
class Drafting:
    """How an engine drafts."""

    # The most tokens guessed after each drawn token.
    most: int = 0
    # See Progress.
    rewind: int = 0
    # None if drafts are accepted strictly.
    think_tokens: ThinkTokens | None = None


NO_DRAFTS = Drafting()


def make_request(
    submit: Submit,
    eos_token_ids: frozenset[int],
    arrival: tuple[int, int],
    drafting: Drafting = NO_DRAFTS,
    computes_sparsely: bool = False,
) -> Request:
    """From a checked Submit.

    eos_token_ids: the model's own; arrival: the arrival batch, and the order within it; computes_sparsely: whether this
    engine uses sparse attention where a request allows it.
    """
    request, stop = submit.request, submit.request.stop
    progress = Progress(request.token_ids, drafting.rewind)
    wanted = request.sampling.drafts
    given = len(request.token_ids) if request.prompt_tokens is None else request.prompt_tokens
    # If tokens were delivered already, the prompt's scores were too.
    asked = request.sampling.prompt_logprobs if given == len(request.token_ids) else None
    return Request(
        key=submit.key,
        request_id=request.request_id,
        progress=progress,
        prompt_tokens=len(request.token_ids),
        limit=len(request.token_ids) + stop.max_tokens,
        stop_token_ids=stop.ends(eos_token_ids),
        sampling=request.sampling,
        most_drafts=0 if wanted == DraftUse.OFF else drafting.most,
        phase=ThinkingPhase(drafting.think_tokens) if drafting.think_tokens and wanted == DraftUse.RELAXED else None,
        history=History(submit.key, given, progress.token_ids) if request.sampling.counts_tokens else None,
        root=root_hash(request.cache_salt),
        sparse=request.sparse,
        sparse_from=request.sparse.from_tokens if computes_sparsely and request.sparse is not None else None,
        arrival=arrival,
        share=request.share,
        remote_prefill=submit.remote_prefill,
        sender_slot_bytes=submit.sender_slot_bytes,
        sender_draft_layers=submit.sender_draft_layers,
        attempt=request.attempt,
        fetch=submit.fetch if asked is None else None,
        push=submit.push,
        prompt_scores=None if asked is None else PromptScores(asked),
        stages=Stages(request.traceparent),
    )


class Intake:
    """Makes the engine's requests, and keeps those back whose grammar is being compiled.

    Without `constraints` requests that have one are refused.
    """

    def __init__(self, config: EngineConfig, backend: Backend, constraints: Constraints | None) -> None:
        self._eos_token_ids = backend.eos_token_ids
        self._limits = RequestLimits(longest_context(backend), backend.vocabulary_size)
        # A draft begins with a token's hidden state, which the backend has only while it computes that token. Each
        # module reads what the module before it made of the token before. So one token is computed again for each
        # module.
        self._drafting = Drafting(config.drafts.most, backend.draft_layers, backend.think_tokens)
        self._computes_sparsely = config.sparse_prefill.offered is not None
        self._constraints = constraints

    @property
    def ready(self) -> bool:
        """Whether `drain` has something."""
        return self._constraints is not None and self._constraints.ready

    @property
    def compiling(self) -> int:
        """Requests that are kept back."""
        return 0 if self._constraints is None else self._constraints.pending

    def make(self, submit: Submit, arrival: tuple[int, int]) -> Request:
        """The request, unchecked. arrival: the arrival batch, and the order within it."""
        return make_request(submit, self._eos_token_ids, arrival, self._drafting, self._computes_sparsely)

    def check(self, submit: Submit) -> None:
        """Raises InvalidRequest."""
        check(submit, self._limits)
        if submit.request.constraint is not None and self._constraints is None:
            raise InvalidConstraint("this engine constrains no answers")

    def begin(self, request: Request, submit: Submit) -> bool:
        """Whether a request that is accepted can be queued at once. If not, `drain` has it later."""
        constraint = submit.request.constraint
        if constraint is None or self._constraints is None:
            return True
        given = submit.request.prompt_tokens
        delivered = [] if given is None else request.progress.token_ids[given:]
        self._constraints.begin(request, constraint, delivered)
        return False

    def drain(self) -> Sequence[tuple[Request, MeshError | None]]:
        """Requests whose grammars were compiled since the last call, or could not be. Some may have ended."""
        return () if self._constraints is None else self._constraints.drain()
