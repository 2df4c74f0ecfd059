"""The store through which torch.distributed's groups find each other: the worker's service keeps keys and values."""

from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import Store


class AskedStore(Store):
    """Keys and values of some ranks of a worker. Since the service keeps them, no rank listens on a port for this."""

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
