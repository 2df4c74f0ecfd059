"""A transfer agent in a process of its own, driven call by call: the other side of tests over real UCX."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from mesh.workers import KvNamespace
from transfer.agent import TransferAgent
from transfer.config import TransferConfig
from transfer.events import Event
from transfer.host_memory import HostMemory

LAYERS, BLOCKS, PIECE_BYTES = 4, 64, 24_000
NAMESPACE = KvNamespace(weights_fingerprint="test", dtype="float32", layers=LAYERS, layout="mla:8+4")
# Nine blocks a whole segment; several segments, and slots that must be used again.
CONFIG = TransferConfig(slot_bytes=900_000, slots=4, layerwise_tokens=512, fetch_seconds=10)


def pool(seed: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """[layers, blocks, piece_bytes] of bytes that tell blocks, layers and seeds apart."""
    return np.random.default_rng(seed).integers(0, 256, (LAYERS, BLOCKS, PIECE_BYTES), np.uint8)


class KnownChains:
    """A `LookupHandler` that knows the first blocks of one chain."""

    def __init__(self, chain: Sequence[bytes], blocks: Sequence[int]) -> None:
        self._known = dict(zip(chain, blocks, strict=True))
        self.leased = 0

    def match(self, session_id: int, hashes: Sequence[bytes]) -> list[int]:
        matched = []
        for each in hashes:
            if each not in self._known:
                break
            matched.append(self._known[each])
        self.leased += len(matched)
        return matched

    def release(self, session_id: int, blocks: Sequence[int]) -> None:
        self.leased -= len(blocks)


class PeerState:
    """What lives in the peer's process."""

    def __init__(self, seed: int, config: TransferConfig, lookups: KnownChains | None) -> None:
        self.array = pool(seed)
        self.lookups = lookups
        self.agent = TransferAgent(HostMemory(self.array), NAMESPACE, config, time.monotonic, lambda: None, lookups)

    def blocks(self, blocks: Sequence[int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        return self.array[:, list(blocks)]

    def corrupt_gathers(self) -> None:
        """From now on what is sent differs in one byte from what is announced."""
        HostMemory.gather = _corrupted(HostMemory.gather)  # type: ignore[method-assign]

    def leased(self) -> int:
        assert self.lookups is not None
        return self.lookups.leased


def _corrupted(gather: Callable[..., bytes]) -> Callable[..., bytes]:
    def corrupted(self: HostMemory, first: int, count: int, blocks: Sequence[int], staging: Any, key: bytes) -> bytes:
        digest = gather(self, first, count, blocks, staging, key)
        staging[self.piece_bytes // 2] ^= 1
        return digest

    return corrupted


class Peer:
    """Calls are made in the other process: `peer.agent("push", ticket, blocks)`, `peer.state("blocks", [1, 2])`."""

    def __init__(self, seed: int = 0, config: TransferConfig = CONFIG, lookups: KnownChains | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, seed, config, lookups), daemon=True)
        self._process.start()
        theirs.close()
        self.address: bytes = self._pipe.recv()

    def agent(self, method: str, *arguments: Any) -> Any:
        return self._call("agent", method, *arguments)

    def state(self, method: str, *arguments: Any) -> Any:
        return self._call("state", method, *arguments)

    def events(self) -> list[Event]:
        return self.agent("events")

    def freeze(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.kill()

    def _call(self, target: str, method: str, *arguments: Any) -> Any:
        self._pipe.send((target, method, arguments))
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _serve(pipe: Connection, seed: int, config: TransferConfig, lookups: KnownChains | None) -> None:
    state = PeerState(seed, config, lookups)
    pipe.send(state.agent.address)
    while True:
        try:
            target, method, arguments = pipe.recv()
        except EOFError:
            break
        try:
            pipe.send(getattr(state.agent if target == "agent" else state, method)(*arguments))
        except Exception as error:  # noqa: BLE001 - it is the caller's
            pipe.send(error)
    state.agent.close()
