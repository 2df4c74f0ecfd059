"""Configuration of a worker's KV events."""

from pydantic import Field

from mesh.config import Config


class KvEventsConfig(Config):
    """Tell routers and observers outside the mesh which KV blocks a worker holds (`deepmesh.v1.KvEventsService`)."""

    enabled: bool = False
    """Keep an account of the blocks, and tell it."""
    token_ids: bool = True
    """Tell the tokens of each block, which foreign routers need to compute hashes of their own. These are the prompts
    and answers of all tenants.
    """
    kept_blocks: int = Field(default=65_536, ge=1)
    """Blocks named in the events that are kept for subscribers that are late or come back; with their tokens some 400
    bytes each. Who needs older events is told all blocks again.
    """
    max_subscribers: int = Field(default=8, ge=1)
    """Streams that may be open at once."""
