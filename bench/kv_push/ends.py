"""Two processes that move KV between them: one receives and looks up blocks, the other sends and acts as a store."""

import multiprocessing
import secrets
import select
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from bench.kv_push.bare import BareReceiver, BareSender
from bench.kv_push.lookup import GrpcLookups, GrpcStore, ShortMemory
from bench.kv_push.pools import Geometry, make_pool
from mesh.domain.kv_identity import KvNamespace
from mesh.event_fd import EventFd
from transfer.agent import TransferAgent
from transfer.config import TransferConfig
from transfer.events import Event, Fetched, Landed, PushEnded
from transfer.fetch.lookup_server import LookupHandler
from transfer.ticket import StoreSession, Ticket
from transfer.tuning import tune_for_gpu_transfers

_SESSION_ID = 1
_SESSION_KEY = bytes(32)
# Lookups that run before the clock starts.
_WARM_LOOKUPS = 200
_LOOKUPS_IN_A_ROW = 100


class _End:
    """An agent with a pool of its own, in a process of its own."""

    def __init__(
        self,
        peer: Connection,
        config: TransferConfig,
        geometry: Geometry,
        gpu: str | None,
        lookups: LookupHandler | None = None,
    ) -> None:
        self.peer = peer
        self.geometry = geometry
        self.news = EventFd()
        # Made once: work just before this thread sleeps would keep another thread from the interpreter.
        self._poll = select.poll()
        self._poll.register(self.news.fileno(), select.POLLIN)
        self._told: deque[Event] = deque()
        # When the agent last reported something.
        self.told_at = 0.0
        self.pool = make_pool(gpu, geometry)
        if gpu is not None:
            tune_for_gpu_transfers()
        self.namespace = KvNamespace("bench", "bfloat16", geometry.layers, "bench")
        self.agent = TransferAgent(self.pool.memory(), self.namespace, config, time.monotonic, self._hear, lookups)
        scattered = np.random.default_rng(1).permutation(geometry.blocks)
        # Blocks of each request.
        self.blocks: list[list[int]] = scattered.reshape(geometry.requests, -1).tolist()

    def cpu_seconds(self) -> float:
        return time.process_time()

    def events(self) -> list[Event]:
        """Wait until the agent reports events."""
        while not self._told:
            self._poll.poll()
            self.news.clear()
        return [self._told.popleft() for _ in range(len(self._told))]

    def _hear(self) -> None:
        """Take the agent's events. Runs in the transfer thread."""
        self.told_at = time.perf_counter()
        self._told.extend(self.agent.events())
        self.news.set()


class _ReceivingEnd(_End):
    def __init__(self, peer: Connection, config: TransferConfig, geometry: Geometry, gpu: str | None) -> None:
        super().__init__(peer, config, geometry, gpu)
        self._bare = BareReceiver(config, self.pool.bare())
        peer.send(self._bare.address)
        store_address, self._grpc_port = peer.recv()
        session = StoreSession("store", "epoch", store_address, _SESSION_ID, _SESSION_KEY, self.namespace)
        self.agent.attach_store(session)

    def push(self, _pause: float, times: int) -> float:
        """Returns the time, by the host's clock, at which the last block was in place.

        The thread that lands it takes the time: waking another thread is not part of a push, as it is not of `bare`.
        """
        tickets = [[self.agent.open_landing(blocks, 0, 0, 60.0) for blocks in self.blocks] for _ in range(times)]
        self.peer.send(tickets)
        landed = 0
        while landed < times * len(self.blocks):
            for event in self.events():
                assert isinstance(event, Landed), event
                landed += 1
        return self.told_at

    def bare(self, pause: float) -> float:
        """Returns the time at which the last byte had arrived."""
        self._bare.receive(lambda: self._start_after(pause))
        return time.perf_counter()

    def _start_after(self, pause: float) -> None:
        time.sleep(pause)
        self.peer.send(True)

    def transport(self) -> str:
        return next(iter(self.agent.counters().received_bytes))

    def local_tcp_bytes(self) -> Mapping[str, int]:
        return self.agent.counters().local_tcp_bytes

    def lookups(self, count: int, blocks: int) -> tuple[list[float], list[float]]:
        """Seconds of each lookup over UCX and of each over gRPC, both as the thread that asks sees them."""
        hashes = [secrets.token_bytes(16) for _ in range(blocks)]
        with GrpcLookups(self._grpc_port, hashes) as grpc:
            for number in range(_WARM_LOOKUPS):
                self._look_up(number, hashes), grpc.look_up()
            ucx_seconds: list[float] = []
            grpc_seconds: list[float] = []
            # The two take turns of many lookups each, so that the store is as wide awake for one as for the other.
            for _ in range(count // _LOOKUPS_IN_A_ROW):
                ucx_seconds += [self._look_up(number, hashes) for number in range(_LOOKUPS_IN_A_ROW)]
                grpc_seconds += [grpc.look_up() for _ in range(_LOOKUPS_IN_A_ROW)]
        return ucx_seconds, grpc_seconds

    def _look_up(self, number: int, hashes: Sequence[bytes]) -> float:
        self.agent.fetch(number, "store", hashes, range(len(hashes)))
        (event,) = self.events()
        assert isinstance(event, Fetched) and event.error is None
        return event.seconds


class _SendingEnd(_End):
    def __init__(self, peer: Connection, config: TransferConfig, geometry: Geometry, gpu: str | None) -> None:
        # It answers lookups, as a store does, which keeps blocks in host memory: an end on a GPU answers none.
        super().__init__(peer, config, geometry, gpu, None if gpu else ShortMemory())
        self._bare = BareSender(config, self.pool.bare(), peer.recv())
        self._grpc = GrpcStore()
        if gpu is None:
            self.agent.open_session(_SESSION_ID, _SESSION_KEY)
        peer.send((self.agent.address, self._grpc.port))

    def push(self, pause: float, times: int) -> float:
        """Returns the time at which the KV of the last of `times` pushes was reported as computed."""
        rounds: list[list[Ticket]] = self.peer.recv()
        assert len(rounds) == times
        for tickets in rounds:
            for ticket, blocks in zip(tickets, self.blocks, strict=True):
                self.agent.push(ticket, blocks[::-1])
        return [self._compute(tickets, pause) for tickets in rounds][-1]

    def _compute(self, tickets: Sequence[Ticket], pause: float) -> float:
        time.sleep(pause)
        began = time.perf_counter()
        for ticket, blocks in zip(tickets, self.blocks, strict=True):
            self.agent.ready(ticket.transfer_id, self.geometry.layers, len(blocks))
        ended = 0
        while ended < len(tickets):
            ended += sum(isinstance(event, PushEnded) for event in self.events())
        return began

    def bare(self, _pause: float) -> float:
        """Returns the time at which it began to send."""
        self.peer.recv()
        began = time.perf_counter()
        self._bare.send()
        return began


def _stay() -> None:
    """A process runs where it was started."""


class Ends:
    """Both processes, controlled by a third, the caller's."""

    def __init__(
        self,
        config: TransferConfig,
        geometry: Geometry,
        gpus: tuple[str | None, str | None],
        enter: tuple[Callable[[], None], Callable[[], None]] = (_stay, _stay),
        limit_seconds: float | None = None,
    ) -> None:
        """gpus: the receiver's and the sender's; None for host memory. enter: what each process calls first.
        limit_seconds: of each call of a process that is ready; one that takes longer raises TimeoutError, and one of a
        process that has ended raises EOFError.
        """
        context = multiprocessing.get_context("spawn")
        left, right = context.Pipe()
        self._receiving = _Remote(context, limit_seconds, enter[0], _ReceivingEnd, left, config, geometry, gpus[0])
        self._sending = _Remote(context, limit_seconds, enter[1], _SendingEnd, right, config, geometry, gpus[1])

    def __enter__(self) -> "Ends":
        return self

    def __exit__(self, *exception: object) -> None:
        self._receiving.stop()
        self._sending.stop()

    def push(self, pause: float, times: int = 1) -> float:
        """Seconds of the last of `times` pushes, from the report that all is computed to the last byte in place,
        verified.

        All pushes are opened at once. Before each, nothing happens for `pause` seconds.
        """
        return self._both("push", pause, times)

    def bare(self, pause: float) -> float:
        """Seconds from the sender's first call to the last byte, for the same bytes in messages of a slot's size.

        Nothing happens for `pause` seconds before.
        """
        return self._both("bare", pause)

    def transport(self) -> str:
        transport: str = self._receiving.call("transport")
        return transport

    def wait_until_ready(self, limit_seconds: float) -> None:
        """Raises TimeoutError, and EOFError if a process has ended."""
        for end in (self._receiving, self._sending):
            end.begin("cpu_seconds")
        for end in (self._receiving, self._sending):
            end.result(limit_seconds)

    def idle_cpu(self, seconds: float) -> tuple[float, float]:
        """Share of a core that each process uses while nothing moves."""
        before = self._cpu_seconds()
        time.sleep(seconds)
        receiving, sending = (after - start for after, start in zip(self._cpu_seconds(), before, strict=True))
        return receiving / seconds, sending / seconds

    def local_tcp_bytes(self) -> Mapping[str, int]:
        """What the receiver got from its own host over TCP, by sender."""
        counted: Mapping[str, int] = self._receiving.call("local_tcp_bytes")
        return counted

    def lookups(self, count: int, blocks: int) -> tuple[list[float], list[float]]:
        seconds: tuple[list[float], list[float]] = self._receiving.call("lookups", count, blocks)
        return seconds

    def _cpu_seconds(self) -> tuple[float, float]:
        return self._receiving.call("cpu_seconds"), self._sending.call("cpu_seconds")

    def _both(self, method: str, *arguments: Any) -> float:
        """Seconds from the time that the sender returns to the receiver's. Both are of the host's one clock."""
        self._sending.begin(method, *arguments)
        ended: float = self._receiving.call(method, *arguments)
        began: float = self._sending.result()
        return ended - began


class _Remote:
    def __init__(
        self,
        context: Any,
        limit_seconds: float | None,
        enter: Callable[[], None],
        end: Callable[..., _End],
        *arguments: Any,
    ) -> None:
        self._limit_seconds = limit_seconds
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, enter, end, *arguments), daemon=True)
        self._process.start()
        # So that this end notices that the process has ended.
        theirs.close()

    def begin(self, method: str, *arguments: Any) -> None:
        self._pipe.send((method, arguments))

    def result(self, limit_seconds: float | None = None) -> Any:
        if not self._pipe.poll(limit_seconds or self._limit_seconds):
            raise TimeoutError("a process does not answer")
        return self._pipe.recv()

    def call(self, method: str, *arguments: Any) -> Any:
        self.begin(method, *arguments)
        return self.result()

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, enter: Callable[[], None], end_class: Callable[..., _End], *arguments: Any) -> None:
    enter()
    end = end_class(*arguments)
    while True:
        method, parameters = pipe.recv()
        pipe.send(getattr(end, method)(*parameters))
