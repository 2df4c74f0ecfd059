"""How OpenAI's clients ask for tokens to be drawn."""

from typing import Literal

from gateway.asks import settled
from gateway.openai.accepted import Accepted
from mesh.domain.sampling import DraftUse, Sampling

# OpenAI's own default.
DEFAULT_TEMPERATURE = 1.0


class SamplingFields(Accepted, kw_only=True):
    """The part of a body that has `Sampling`'s fields under their own names; None leaves the choice to us."""

    temperature: float | None = None
    top_p: float | None = None
    # -1 asks for all tokens, as 0 does.
    top_k: int | None = None
    seed: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    # By token id, which JSON writes as text.
    logit_bias: dict[int, float] | None = None
    # What the worker may do with tokens that it guesses: see docs/drafts.md.
    drafts: Literal["off", "strict", "relaxed"] | None = None

    def sampling(self, top_logprobs: int | None) -> Sampling:
        """`check_sampling` has yet to judge it."""
        named = ((name, getattr(self, name)) for name in Sampling.__struct_fields__ if hasattr(self, name))
        given = {"temperature": DEFAULT_TEMPERATURE, **{name: value for name, value in named if value is not None}}
        if self.top_k == -1:
            del given["top_k"]
        given.pop("seed", None)
        given["drafts"] = DraftUse.UNSPECIFIED if self.drafts is None else DraftUse[self.drafts.upper()]
        return settled(Sampling(**{**given, "top_logprobs": top_logprobs}), self.seed)
