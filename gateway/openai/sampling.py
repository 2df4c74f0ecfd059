"""How OpenAI's clients control the sampling of tokens."""

from typing import Literal

from gateway.asks import settled
from gateway.openai.accepted import Accepted
from gateway.sampling_defaults import SamplingDefaults
from mesh.domain.sampling import DraftUse, Sampling

# OpenAI's own default.
DEFAULT_TEMPERATURE = 1.0


class SamplingFields(Accepted, kw_only=True):
    """The fields of a body that have the same names as `Sampling`'s; None leaves the choice to us."""

    temperature: float | None = None
    top_p: float | None = None
    # -1 means all tokens, as 0 does.
    top_k: int | None = None
    seed: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    # By token id, which is text in JSON.
    logit_bias: dict[int, float] | None = None
    # How the worker may use drafts: see docs/drafts.md.
    drafts: Literal["off", "strict", "relaxed"] | None = None

    def default_to(self, defaults: SamplingDefaults) -> None:
        """Fill in what the request does not say."""
        for name, value in defaults.said.items():
            if getattr(self, name) is None:
                setattr(self, name, value)

    def sampling(self, top_logprobs: int | None) -> Sampling:
        """The `Sampling` that the fields give. The caller must still pass it to `check_sampling`."""
        named = ((name, getattr(self, name)) for name in Sampling.__struct_fields__ if hasattr(self, name))
        given = {"temperature": DEFAULT_TEMPERATURE, **{name: value for name, value in named if value is not None}}
        if self.top_k == -1:
            del given["top_k"]
        given.pop("seed", None)
        given["drafts"] = DraftUse.UNSPECIFIED if self.drafts is None else DraftUse[self.drafts.upper()]
        return settled(Sampling(**{**given, "top_logprobs": top_logprobs}), self.seed)
