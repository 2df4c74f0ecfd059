"""A transfer agent in a process of its own, driven call by call: the other side of tests over real UCX."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from mesh.domain.kv_identity import KvNamespace
from mesh.domain.workers import TransferCounters
from tests.support.forking import FORK
from tests.support.waiting import wait_until
from transfer.agent import TransferAgent
from transfer.config import TransferConfig
from transfer.events import Event
from transfer.fetch.lookup_server import Found
from transfer.host_memory import HostMemory
from transfer.mailbox import Mailbox
from transfer.memory import Done, KvMemory
from transfer.tuning import tune_for_gpu_transfers

LAYERS, BLOCKS, PIECE_BYTES = 4, 64, 24_064
NAMESPACE = KvNamespace(weights_fingerprint="test", dtype="float32", layers=LAYERS, layout="mla:8+4")
# A full segment has nine blocks, so that transfers have several segments and use slots again.
CONFIG = TransferConfig(slot_bytes=900_000, slots=4, layerwise_tokens=512, fetch_seconds=60, devices="lo")


class Setup(NamedTuple):
    """The setup of one side."""

    seed: int = 0
    config: TransferConfig = CONFIG
    lookups: "KnownChains | None" = None
    piece_bytes: int = PIECE_BYTES
    namespace: KvNamespace = NAMESPACE
    # The GPU of its pool, as in CUDA_VISIBLE_DEVICES, for a side in a process of its own; None for host memory.
    gpu: str | None = None


class KnownChains:
    """A `LookupHandler` that knows the first blocks of one chain."""

    def __init__(self, chain: Sequence[bytes], blocks: Sequence[int]) -> None:
        self._known = dict(zip(chain, blocks, strict=True))
        self.leased = 0

    def match(self, session_id: int, sequence: int, hashes: Sequence[bytes]) -> Found:
        matched = []
        for each in hashes:
            if each not in self._known:
                break
            matched.append(self._known[each])
        self.leased += len(matched)
        return Found(matched, len(matched))

    def release(self, session_id: int, sequence: int, blocks: Sequence[int]) -> None:
        self.leased -= len(blocks)


class Lost:
    """A `Transmission` that was lost on its way."""

    completed = True

    def error(self) -> None:
        return None


class Side:
    """An agent with a pool of its own: [layers, blocks, piece_bytes] of random bytes that differ by block, layer and
    seed.
    """

    def __init__(self, setup: Setup) -> None:
        shape = (LAYERS, BLOCKS, setup.piece_bytes)
        self.array = np.random.default_rng(setup.seed).integers(0, 256, shape, np.uint8)
        self.lookups = setup.lookups
        # A pool on a GPU: [layers, blocks, piece_bytes].
        self._pool: Any = None
        memory = HostMemory(self.array) if setup.gpu is None else self._on_gpu(setup.gpu)
        self._ahead = 0.0
        self._agent = TransferAgent(memory, setup.namespace, setup.config, self._clock, lambda: None, setup.lookups)

    def _on_gpu(self, gpu: str) -> KvMemory:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
        tune_for_gpu_transfers()
        # Imported here: CUDA reads the variable only once, and most tests do without torch.
        import torch

        from engine.runner.device_memory import DeviceMemory

        pool = torch.from_numpy(self.array).view(LAYERS, BLOCKS, 64, -1).cuda()
        self._pool = pool.view(*self.array.shape)
        return DeviceMemory(pool)

    def agent(self, method: str, *arguments: Any) -> Any:
        """Call the agent."""
        return getattr(self._agent, method)(*arguments)

    def address(self) -> bytes:
        return self._agent.address

    def pass_time(self, seconds: float) -> None:
        """Move this side's clock on."""
        self._ahead += seconds
        # Wake the thread, which would otherwise sleep until the deadline that it knew.
        self._agent.cancel_landing(b"none")

    def _clock(self) -> float:
        return time.monotonic() + self._ahead

    def blocks(self, blocks: Sequence[int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if self._pool is not None:
            self.array[:] = self._pool.cpu().numpy()
        return self.array[:, list(blocks)]

    def corrupt_gathers(self) -> None:
        """From now on, sent bytes differ in one byte from what the checksums announce."""
        HostMemory.gather = _corrupted(HostMemory.gather)  # type: ignore[method-assign]

    def lose_checksums(self) -> None:
        """From now on, the messages with segments' checksums are lost on their way."""
        Mailbox.send = lambda *_: Lost()  # type: ignore[method-assign]

    def leased(self) -> int:
        assert self.lookups is not None
        return self.lookups.leased


def _corrupted(gather: Callable[..., Done[bytes]]) -> Callable[..., Done[bytes]]:
    def corrupted(
        self: HostMemory, first: int, count: int, blocks: Sequence[int], staging: Any, key: bytes
    ) -> Done[bytes]:
        checksum = gather(self, first, count, blocks, staging, key)
        staging[self.piece_bytes // 2] ^= 1
        return checksum

    return corrupted


class Peer:
    """A `Side` in another process: `peer.agent("push", ticket, blocks)`."""

    def __init__(self, **setup: Any) -> None:
        self._pipe, theirs = FORK.Pipe()
        self._process = FORK.Process(target=_serve, args=(theirs, Setup(**setup)), daemon=True)
        self._process.start()
        theirs.close()

    def agent(self, method: str, *arguments: Any) -> Any:
        return self._call("agent", method, *arguments)

    def blocks(self, blocks: Sequence[int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self._call("blocks", blocks)

    def address(self) -> bytes:
        return self._call("address")

    def corrupt_gathers(self) -> None:
        self._call("corrupt_gathers")

    def lose_checksums(self) -> None:
        self._call("lose_checksums")

    def pass_time(self, seconds: float) -> None:
        self._call("pass_time", seconds)

    def leased(self) -> int:
        return self._call("leased")

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def freeze(self) -> None:
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def _call(self, method: str, *arguments: Any) -> Any:
        self._pipe.send((method, arguments))
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(pipe: Connection, setup: Setup) -> None:
    side = Side(setup)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send(getattr(side, method)(*arguments))
        except Exception as error:  # noqa: BLE001 - it is the caller's
            pipe.send(error)
    side.agent("close")


@contextmanager
def two_sides(local: Setup = Setup(seed=1), **remote: Any) -> Iterator[tuple[Side, Peer]]:  # noqa: B008 - immutable
    """One side in this process, and one in another."""
    peer = Peer(**{"seed": 2, **remote})
    side = Side(local)
    try:
        yield side, peer
    finally:
        side.agent("close")
        peer.kill()


class Watch:
    """Keeps the events of both sides."""

    def __init__(self, receiver: Side | Peer, sender: Side | Peer) -> None:
        self.receiver = receiver
        self.sender = sender
        self.received: list[Event] = []
        self.sent: list[Event] = []

    def look(self) -> None:
        self.received += self.receiver.agent("events")
        self.sent += self.sender.agent("events")

    def until(self, *kinds: type[Event]) -> None:
        """Wait until the two sides together have had an event of each of these kinds."""

        def had() -> bool:
            self.look()
            return all(any(isinstance(event, kind) for event in self.received + self.sent) for kind in kinds)

        wait_until(had)


def assert_all_free(side: Side | Peer) -> TransferCounters:
    """Wait until nothing is open and every slot is free again."""

    def all_free() -> bool:
        counters = side.agent("counters")
        opened = counters.open_landings + counters.open_pushes + counters.open_fetches
        return bool(not opened and counters.free_slots == counters.total_slots)

    wait_until(all_free)
    counters: TransferCounters = side.agent("counters")
    return counters
