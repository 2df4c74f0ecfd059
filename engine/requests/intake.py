"""A request's way from its Submit to the queue."""

from collections.abc import Sequence

from engine.batch import Backend
from engine.config import EngineConfig
from engine.constraints.constraints import Constraints
from engine.protocol.messages import Submit
from engine.requests.request import Request
from engine.requests.submission import Drafting, RequestLimits, check, longest_context, make_request
from mesh.errors import InvalidConstraint, MeshError


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
