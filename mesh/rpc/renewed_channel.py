"""A channel that reconnects when its certificate is renewed: gRPC's own channels keep their first credentials."""

# grpc's classes are generic only in their stubs.
from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

import grpc

# How long calls that began before a renewal may continue.
OLD_CALLS_SECONDS = 24 * 3600.0


class RenewedChannel(grpc.aio.Channel):
    """Each call uses the latest channel that `connect` made; a new one is made when `version` changes.

    Open calls end on the channel on which they began.
    """

    def __init__(self, connect: Callable[[], grpc.aio.Channel], version: Callable[[], int]) -> None:
        self._connect = connect
        self._latest_version = version
        self._version = version()
        self._channel = connect()
        self._retiring: dict[grpc.aio.Channel, asyncio.Task[None]] = {}

    async def __aenter__(self) -> RenewedChannel:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        retiring, self._retiring = self._retiring, {}
        for task in retiring.values():
            task.cancel()
        await asyncio.gather(*retiring.values(), return_exceptions=True)
        await asyncio.gather(*(channel.close(grace) for channel in (*retiring, self._channel)))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._latest().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._latest().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._latest().channel_ready()

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._method("unary_unary", arguments, options)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._method("unary_stream", arguments, options)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return self._method("stream_unary", arguments, options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return self._method("stream_stream", arguments, options)

    def _method(self, kind: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """A method that looks up the current channel at each call, because a stub keeps its methods for ever."""

        def call(*call_arguments: Any, **call_options: Any) -> Any:
            return getattr(self._latest(), kind)(*arguments, **options)(*call_arguments, **call_options)

        return call

    def _latest(self) -> grpc.aio.Channel:
        version = self._latest_version()
        if version != self._version:
            old, self._channel, self._version = self._channel, self._connect(), version
            task = asyncio.create_task(old.close(OLD_CALLS_SECONDS))
            self._retiring[old] = task
            task.add_done_callback(lambda _: self._retiring.pop(old, None))
        return self._channel
