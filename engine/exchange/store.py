"""The store through which ranks with the same number on their hosts find each other, and what they tell through it."""

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

# torch.distributed takes these names from here too.
from torch._C._distributed_c10d import PrefixStore, Store


class AskedStore(Store):
    """The store through which the ranks of a rail find each other. Their service keeps keys and values, so that no rank
    listens on a port for this.
    """

    def __init__(self, name: str, publish: Callable[[str, bytes], None], look_up: Callable[[str], bytes]) -> None:
        """name: shared by these ranks alone; look_up: blocks until there is a value for the key."""
        super().__init__()
        self._name = name
        self._publish = publish
        self._look_up = look_up
        self._found: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._publish(self._named(key), value)

    def get(self, key: str) -> bytes:
        if key not in self._found:
            self._found[key] = self._look_up(self._named(key))
        return self._found[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self.get(key)

    def _named(self, key: str) -> str:
        return f"{self._name}/{key}"


def shared(store: Store, name: str, own: int, hosts: int, value: object) -> list[Any]:
    """The values of all hosts, in order. Called by one rank of each host at once. own: its host's number."""
    # Not the store itself, which may be written in Python: torch gives that bytes only through a PrefixStore.
    part = PrefixStore(name, store)
    part.set(str(own), json.dumps(value))
    return [json.loads(part.get(str(host))) for host in range(hosts)]
