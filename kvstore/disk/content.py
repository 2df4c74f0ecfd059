"""The description of a disk slot's content, apart from its bytes."""

from typing import NamedTuple

from kvstore.keys import Key
from kvstore.quotas import Tenant


class Content(NamedTuple):
    """A block's key, its tenant, and the key (of base layers) before it in its chain: None at the root, or if
    unknown.
    """

    key: Key
    tenant: Tenant = b""
    parent: Key | None = None
