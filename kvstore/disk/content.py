"""What a slot of the disk has, beside the bytes."""

from typing import NamedTuple

from kvstore.keys import Key
from kvstore.quotas import Tenant


class Content(NamedTuple):
    """A block, whose it is, and the key (of base layers) before it in its chain: None at the root, and if unknown."""

    key: Key
    tenant: Tenant = b""
    parent: Key | None = None
