"""A rank's client without a rank: it emits the messages that a test gives it, and records those that it is sent."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import msgspec

from engine.protocol.messages import FirstToken, LandingOpened, Ready, StepResult, TransferNews
from engine.protocol.pulse import LoopProgress
from mesh.errors import EngineFailed
from tests.support.decoding import READY, FakeRank
from transfer.ticket import StoreSession, Ticket

# The first message of a rank that takes part in transfers.
TRANSFER_READY = msgspec.structs.replace(READY, transfer_address=b"address of the rank")


class FakeRankClient(FakeRank):
    """Stands in for `worker.ranks.client.RankClient`. Construct it inside the event loop."""

    def __init__(self, ready: Ready = TRANSFER_READY) -> None:
        super().__init__()
        self.name = "the engine process"
        self.ready = ready
        self.closed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        # A frozen rank has no heartbeat.
        self.frozen = False
        self.beats = 0
        self.first_tokens: list[FirstToken] = []
        self.attached: dict[str, StoreSession] = {}
        self.offered: list[tuple[Ticket, list[bytes]]] = []
        self._messages: asyncio.Queue[StepResult | TransferNews | None] = asyncio.Queue()
        self.results: AsyncIterator[StepResult | TransferNews] = self._results()

    def emit(self, *messages: StepResult | TransferNews) -> None:
        for message in messages:
            self._messages.put_nowait(message)

    @property
    def unread(self) -> int:
        """Messages that the service has yet to read."""
        return self._messages.qsize()

    def die(self) -> None:
        self.dead = True
        self.closed.set_result(9)
        self._messages.put_nowait(None)

    def progress(self) -> LoopProgress:
        self.beats += not self.frozen
        return LoopProgress(self.beats, 0, 0, 0)

    def first_token(self, first: FirstToken) -> None:
        super().first_token(first)
        self.first_tokens.append(first)

    def attach_store(self, session: StoreSession) -> None:
        self._check_alive()
        self.attached[session.store_id] = session

    def detach_store(self, store_id: str) -> None:
        self._check_alive()
        del self.attached[store_id]

    def push_offer(self, ticket: Ticket, hashes: Sequence[bytes]) -> None:
        self._check_alive()
        self.offered.append((ticket, list(hashes)))

    def open_landing(self, key: int, ticket: Ticket, held_blocks: int = 0) -> None:
        self.emit(LandingOpened(key, ticket, held_blocks))

    def kill(self) -> None:
        if not self.closed.done():
            self.die()

    async def close(self, grace_seconds: float = 0.0) -> None:
        if not self.closed.done():
            self.die()

    async def _results(self) -> AsyncIterator[StepResult | TransferNews]:
        while (message := await self._messages.get()) is not None:
            yield message

    def _check_alive(self) -> None:
        if self.dead:
            raise EngineFailed("the engine process has ended")
