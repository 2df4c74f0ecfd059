"""UCX as a `Transport`: one context and one worker, progressed by the thread that uses it."""

import os
from typing import Any

import psutil

from mesh.errors import ConfigError
from mesh.start_times import StartTimes
from transfer.network import missing_devices, opened_devices
from transfer.transport import Arrival, Transmission
from transfer.ucx_endpoint import UcxEndpoint, UcxRequest, UcxSend
from transfer.ucx_settings import ucx_settings

_CLOSE_PERIOD_NS = 10_000_000
# UCX gives up a connection at its first error, even one that a second attempt would not meet. A peer that is gone
# refuses at once.
_ATTEMPTS = 2


class UcxTransport:
    """Probes for messages of any tag, rather than posting receives ahead that might never be matched."""

    def __init__(self, transports: str | None, devices: str | None = None, times: StartTimes | None = None) -> None:
        """`times` records the duration of each phase.

        Raises ConfigError if ucxx is missing, if UCX does not start with these transports and network devices, or lacks
        one of the devices.
        """
        times = times or StartTimes()
        self._ucx, self._array = _import_ucxx()
        times.mark("transfer-imports")
        try:
            features = (self._ucx.Feature.TAG, self._ucx.Feature.WAKEUP)
            context = self._ucx.UCXContext(ucx_settings(transports, devices), features)
            _check_devices(os.environ.get("UCX_NET_DEVICES", devices), context.info)
            self._worker = self._ucx.UCXWorker(context)
            self._worker.init_blocking_progress_mode()
        except self._ucx.UCXError as error:
            told = f"transfer.transports={transports!r} and transfer.devices={devices!r}"
            room = "" if os.access("/dev/shm", os.W_OK) else ", and /dev/shm is missing or cannot be written"
            raise ConfigError(f"UCX does not start with {told}{room}: {error}") from error
        self.address: bytes = self._worker.address.tobytes()
        self._any_tag, self._any_mask = self._ucx.UCXXTag(0), self._ucx.UCXXTagMask(0)
        self._endpoints: dict[bytes, UcxEndpoint] = {}
        # Endpoints where nothing has arrived yet.
        self._connecting: dict[bytes, UcxEndpoint] = {}
        # Receives of discarded messages, until UCX has completed them.
        self._discarded: list[UcxRequest] = []
        times.mark("ucx")

    def fileno(self) -> int:
        """A descriptor that becomes readable when `progress` has work, after `arm` returned True."""
        descriptor: int = self._worker.epoll_file_descriptor
        return descriptor

    def arm(self) -> bool:
        """Arm the descriptor. False if there is something to progress already."""
        armed: bool = self._worker.arm()
        return armed

    def progress(self) -> None:
        self._worker.progress()
        if self._connecting:
            self._look_at_connections()
        if self._discarded:
            self._discarded = [request for request in self._discarded if not request.completed]

    def send(self, address: bytes, tag: int, buffer: Any) -> Transmission:
        # UCX ends the process if it gets an address of another version.
        if address[:1] != self.address[:1]:
            return _Unsent("this is no address of a UCX worker")
        endpoint = self._endpoints.get(address)
        if endpoint is None or not endpoint.alive:
            try:
                endpoint = self._connect(address, _ATTEMPTS - 1)
            except self._ucx.UCXError as error:
                return _Unsent(str(error))
        return UcxSend(endpoint, self._ucx.UCXXTag(tag), self._array(buffer), buffer, self._ucx.UCXError)

    def next_arrival(self) -> Arrival | None:
        probe = self._worker.tag_probe(self._any_tag, self._any_mask, True)
        return Arrival(probe.sender_tag.value, probe.length, probe) if probe.matched else None

    def receive(self, arrival: Arrival, buffer: Any) -> UcxRequest:
        request = self._worker.tag_recv_with_handle(self._array(buffer), arrival.handle)
        return UcxRequest(request, buffer, self._ucx.UCXError)

    def discard(self, arrival: Arrival) -> None:
        # Receiving into an empty buffer truncates the message, ends it on both sides, and frees the sender's buffer.
        self._discarded.append(self.receive(arrival, bytearray()))

    def is_reachable(self, address: bytes) -> bool:
        endpoint = self._endpoints.get(address)
        return endpoint is None or endpoint.alive

    def transport_name(self, address: bytes, from_host: bool) -> str | None:
        endpoint = self._endpoints.get(address)
        return endpoint.transport_name(from_host) if endpoint is not None else None

    def disconnect(self, address: bytes) -> None:
        endpoint = self._endpoints.pop(address, None)
        self._connecting.pop(address, None)
        # UCX has closed the endpoint of a dead peer itself; over TCP, closing it again crashes the process.
        if endpoint is not None and endpoint.alive:
            # UCX's other way to close flushes first, which never ends if the peer is frozen; this one cancels, within
            # 0.1 ms.
            endpoint.handle.close_blocking(_CLOSE_PERIOD_NS, 1)

    def drop_dead_peers(self) -> None:
        """Forget the connections to peers that are gone."""
        for address in [address for address, endpoint in self._endpoints.items() if not endpoint.alive]:
            self.disconnect(address)

    def close(self) -> None:
        """Close every connection, and end all messages in flight."""
        for address in list(self._endpoints):
            self.disconnect(address)
        self._worker.progress()
        self._worker.cancel_inflight_requests()
        self._worker.progress()

    def _connect(self, address: bytes, attempts_left: int) -> UcxEndpoint:
        """Begin to connect. Raises UCXError."""
        endpoint = UcxEndpoint(self._connect_worker(address), attempts_left)
        self._endpoints[address] = self._connecting[address] = endpoint
        return endpoint

    def _connect_worker(self, address: bytes) -> Any:
        peer = self._ucx.UCXAddress.create_from_buffer(address)
        return self._worker.create_endpoint_from_worker_address(peer, True)

    def _look_at_connections(self) -> None:
        for address, endpoint in list(self._connecting.items()):
            if endpoint.connected:
                del self._connecting[address]
            elif not endpoint.alive:
                del self._connecting[address]
                self._connect_again(address, endpoint)

    def _connect_again(self, address: bytes, failed: UcxEndpoint) -> None:
        if not failed.attempts_left:
            return
        try:
            endpoint = self._connect(address, failed.attempts_left - 1)
        except self._ucx.UCXError:
            # The messages keep their first error.
            return
        for request in failed.first_requests:
            request.send_again(endpoint)


class _Unsent:
    """A message to a peer that could not be connected."""

    completed = True

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def error(self) -> str | None:
        return self._reason


def _check_devices(asked: str | None, description: str) -> None:
    """Raises ConfigError. asked: as UCX_NET_DEVICES has it; description: of the context that was made with it."""
    missing = [] if asked is None else missing_devices(asked, opened_devices(description))
    if missing:
        raise ConfigError(
            f"transfer.devices={asked}: UCX finds no {', '.join(missing)} (the network interfaces are"
            f" {', '.join(sorted(psutil.net_if_addrs()))}). RDMA needs a UCX that is built with verbs, and a container"
            " that is given the device: docs/start/kubernetes.md"
        )


def _import_ucxx() -> tuple[Any, Any]:
    # ucxx sets a variable that a UCX without CUDA does not know and would warn of. UCX reads this setting when it is
    # loaded.
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    try:
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array
    except ImportError as error:
        raise ConfigError("KV transfers need UCX: install ucxx-cu13 (Linux only), or run without --prefill") from error
    return libucxx, Array
