"""Configuration of experts that lie in host memory."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mesh.config import Config


class OffloadConfig(Config):
    """Routed experts in host memory, copied to the GPU while the layers before theirs compute: see docs/sizing.md. This
    is for workers that compute prompts; decode steps would wait for the link.
    """

    layers: Annotated[int, Field(ge=0)] | Literal["auto"] = 0
    """How many layers have their experts in page-locked host memory; "auto" is as few as leave room on the GPU for
    `kv_tokens`, and the log says how many these are.
    """
    slots: int = Field(default=2, ge=1)
    """For how many of these layers the GPU has room at a time. With one, a layer's experts come while the layers
    between it and the previous one of these compute; with two, also while that one computes its own experts.
    """
    kv_tokens: int | None = Field(default=None, ge=64)
    """Tokens of KV for which "auto" leaves room; by default a whole context, or two steps if these are more."""

    @model_validator(mode="after")
    def _saves_memory(self) -> Self:
        if self.layers != "auto" and 0 < self.layers <= self.slots:
            raise ValueError(
                f"engine.offload.layers={self.layers} saves no memory with engine.offload.slots={self.slots}: set"
                " more layers, or fewer slots"
            )
        return self
