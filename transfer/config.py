"""Configuration of KV transfers."""

from typing import Self

from pydantic import Field

from mesh.config import INTERNAL, Config
from transfer.network import devices_of


class TransferConfig(Config):
    """How KV moves between processes."""

    slot_bytes: int = Field(default=64 << 20, ge=1 << 16, le=64 << 20)
    """Size of a staging slot, which holds one segment."""
    slots: int = Field(default=8, ge=2)
    """Number of staging slots: segments that can be in flight at once."""
    layerwise_tokens: int = Field(default=2048, ge=64)
    """Prompts of at least this many tokens are pushed per layer group, while later layers are computed."""
    landing_seconds: float = Field(default=60.0, gt=0)
    """How long the KV of one request or offer may take to arrive, in addition to `landing_token_ms`."""
    landing_token_ms: float = Field(default=2.0, ge=0, json_schema_extra=INTERNAL)
    """Additional milliseconds for each token of the prompt that is computed meanwhile: 128k tokens may take a minute on
    the fastest card, after other prompts.
    """
    fetch_seconds: float = Field(default=5.0, gt=0)
    """How long a fetch from a KV store may take."""
    map_stores: bool = True
    """Copy blocks from a KV store on the same host straight out of its memory, where this process may map it; false has
    UCX bring them.
    """
    transports: str | None = None
    """UCX transports to choose from, in UCX's own syntax, e.g. "tcp" or "posix,self"; null leaves the choice to UCX."""
    devices: str | None = None
    """Network devices that UCX may use and listen on, e.g. "eth0" or "eth0,mlx5_0:1", or "all"; null uses the device
    with the address of server.host.
    """

    def landing_seconds_for(self, tokens: int) -> float:
        """How long the KV of a prompt may take to arrive if `tokens` of its tokens are computed meanwhile."""
        return self.landing_seconds + tokens * self.landing_token_ms / 1000

    def listening_on(self, host: str) -> Self:
        """The configuration with the network device of this address, unless it names devices. Raises ConfigError."""
        return self if self.devices is not None else self.model_copy(update={"devices": devices_of(host)})
