"""What the stores' client needs from a rank."""

from collections.abc import Sequence
from typing import Protocol

from transfer.ticket import StoreSession, Ticket


class StoreUser(Protocol):
    """Each call returns at once."""

    def attach_store(self, session: StoreSession) -> None:
        """Fetch from this store, with this session; it replaces an earlier session with the same store."""
        ...

    def detach_store(self, store_id: str) -> None:
        """The store is gone until it is attached again."""
        ...

    def push_offer(self, ticket: Ticket, hashes: Sequence[bytes]) -> None:
        """Push the blocks with these hashes. `StoreClient.push_ended` is called when the push has ended.

        If one of the blocks is gone from the pool, the push ends with an error.
        """
        ...
