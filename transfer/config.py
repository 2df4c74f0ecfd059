"""Configuration of KV transfers."""

from pydantic import Field

from mesh.config import Config


class TransferConfig(Config):
    # Size of a staging slot, which holds one segment.
    slot_bytes: int = Field(default=8 << 20, ge=1 << 16, le=64 << 20)
    slots: int = Field(default=8, ge=2)
    # Prompts of at least so many tokens are pushed per layer group, while later layers are computed.
    layerwise_tokens: int = Field(default=2048, ge=64)
    landing_seconds: float = Field(default=60.0, gt=0)
    fetch_seconds: float = Field(default=5.0, gt=0)
    # UCX transports to choose from, e.g. "tcp" or "posix,self", in UCX's own syntax; None leaves it to UCX.
    transports: str | None = None
