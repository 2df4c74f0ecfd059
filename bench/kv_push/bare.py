"""The yardstick: ucxx moving the same bytes in large messages from one buffer straight into another."""

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from ucxx._lib import libucxx
from ucxx._lib.arr import Array

from transfer.config import TransferConfig
from transfer.ucx_settings import ucx_settings


class _Bare:
    def __init__(self, config: TransferConfig, memory: Any) -> None:
        """memory: a uint8 array or tensor."""
        features = (libucxx.Feature.TAG, libucxx.Feature.WAKEUP)
        self.worker = libucxx.UCXWorker(libucxx.UCXContext(ucx_settings(config.transports, config.devices), features))
        flat = memory.reshape(-1)
        step = config.slot_bytes
        self._messages = [Array(flat[start : start + step]) for start in range(0, len(flat), step)]
        self._in_flight = config.slots
        self._rounds = 0

    @property
    def address(self) -> bytes:
        address: bytes = self.worker.address.tobytes()
        return address

    def transfer(self, start: Callable[["Array[Any]", Any], Any]) -> None:
        """Start every message's request in order, and wait for all."""
        requests: deque[Any] = deque()
        for number, message in enumerate(self._messages):
            while len(requests) >= self._in_flight:
                self._await_first(requests)
            requests.append(start(message, libucxx.UCXXTag(self._rounds * len(self._messages) + number)))
        while requests:
            self._await_first(requests)
        self._rounds += 1

    def _await_first(self, requests: deque[Any]) -> None:
        while not requests[0].completed:
            self.worker.progress()
        requests.popleft().check_error()


class BareReceiver(_Bare):
    def receive(self, start_sender: Callable[[], None]) -> float:
        """Seconds from telling the sender to the last byte."""
        began = time.perf_counter()
        start_sender()
        self.transfer(self.worker.tag_recv)
        return time.perf_counter() - began


class BareSender(_Bare):
    def __init__(self, config: TransferConfig, memory: Any, address: bytes) -> None:
        super().__init__(config, memory)
        peer = libucxx.UCXAddress.create_from_buffer(address)
        self._endpoint = self.worker.create_endpoint_from_worker_address(peer, True)

    def send(self) -> None:
        self.transfer(self._endpoint.tag_send)
