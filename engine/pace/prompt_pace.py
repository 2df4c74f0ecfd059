"""How fast prompts with exact attention are computed, and prompts with sparse attention."""

import msgspec

from engine.pace.smoothing import SmoothedRatio
from mesh.domain.sparse_prefill import sparse_part
from mesh.domain.workers import PromptPace


class PromptTokens(msgspec.Struct, frozen=True):
    """The prompt tokens of one step: how many are attended to exactly and how many sparsely. The context of either kind
    is the sum, over its tokens, of how many tokens are before each.
    """

    exact: int = 0
    sparse: int = 0
    exact_context: float = 0.0
    sparse_context: float = 0.0

    @property
    def all(self) -> int:
        return self.exact + self.sparse

    def with_chunk(self, start: int, end: int, sparse_from: int | None) -> "PromptTokens":
        """These, and the tokens at positions [start, end) of a prompt."""
        middle = end - sparse_part(start, end, sparse_from)
        return PromptTokens(
            self.exact + middle - start,
            self.sparse + end - middle,
            self.exact_context + (middle - start) * (start + middle) / 2,
            self.sparse_context + (end - middle) * (middle + end) / 2,
        )


NO_PROMPTS = PromptTokens()


class PromptPaceMeter:
    """Learns both paces from steps that have one kind, and divides the time of mixed steps by what it knows so far."""

    def __init__(self) -> None:
        self._exact = _Kind()
        self._sparse = _Kind()

    def observe(self, prompts: PromptTokens, seconds: float, decay: float) -> None:
        sparse_share = self._sparse_share(prompts)
        if prompts.exact:
            self._exact.observe(prompts.exact, prompts.exact_context, seconds, 1.0 - sparse_share, decay)
        if prompts.sparse:
            self._sparse.observe(prompts.sparse, prompts.sparse_context, seconds, sparse_share, decay)

    @property
    def exact(self) -> PromptPace | None:
        """None while unknown."""
        return self._exact.pace

    @property
    def sparse(self) -> PromptPace | None:
        """None while unknown."""
        return self._sparse.pace

    def _sparse_share(self, prompts: PromptTokens) -> float:
        """The sparse tokens' share of a step's time. Tokens of both kinds take equally long until both are known."""
        exact, sparse = self._exact.pace, self._sparse.pace
        weight = 1.0 if exact is None or sparse is None else exact.tokens_per_second / sparse.tokens_per_second
        return prompts.sparse * weight / (prompts.exact + prompts.sparse * weight)


class _Kind:
    def __init__(self) -> None:
        self._rate = SmoothedRatio()
        self._context = SmoothedRatio()
        self._step_tokens = SmoothedRatio()

    def observe(self, tokens: int, context: float, seconds: float, share: float, decay: float) -> None:
        """A step of `seconds`, of which these tokens took `share`."""
        self._rate.observe(tokens, seconds * share, decay)
        self._context.observe(context, tokens, decay)
        self._step_tokens.observe(tokens, share, decay)

    @property
    def pace(self) -> PromptPace | None:
        rate = self._rate.value
        return None if rate is None else PromptPace(rate, self._context.value or 0.0, self._step_tokens.value)
