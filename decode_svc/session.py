"""One gateway's requests, and the stream that carries their output to it.

Output is not queued: a session remembers which requests have unsent output, and a frame is built from their histories
when the stream can take one. A gateway that keeps up gets one frame per step; one that lags gets several steps in one
frame; one that never reads costs only the histories, which are kept anyway.
"""

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

from decode_svc.requests import OutputSlice, Request
from mesh.errors import InvalidRequest, MeshError, StreamReplaced

# Most plain tokens in one frame, so that it stays far below the message limit whatever has piled up.
FRAME_TOKENS = 32_768


class Frame(NamedTuple):
    """All unsent output of one gateway, as of one engine step."""

    step: int
    outputs: list[OutputSlice]


class GatewayAttachment:
    """One stream of a gateway, until it breaks or another stream replaces it."""

    def __init__(self, session: "GatewaySession") -> None:
        self.session = session
        self._wake = asyncio.Event()
        self._ended = False
        self._error: MeshError | None = None

    @property
    def is_current(self) -> bool:
        return self.session.attachment is self

    def check_current(self) -> None:
        """Raises StreamReplaced if another stream has replaced this one."""
        if not self.is_current:
            raise StreamReplaced("this gateway opened another stream to this worker, which replaces this one")

    async def next_frame(self) -> Frame | None:
        """Wait for output. At the end of the stream, after the last output: None, or raise the error that was passed to
        `end`.
        """
        while True:
            self.check_current()
            if (frame := self.session.take_frame()) is not None:
                return frame
            if self._error is not None:
                raise self._error
            if self._ended:
                return None
            self._wake.clear()
            await self._wake.wait()

    def wake(self) -> None:
        self._wake.set()

    def end(self, error: MeshError | None = None) -> None:
        """End the stream after the output that is there."""
        self._ended, self._error = True, self._error or error
        self._wake.set()


class GatewaySession:
    """What the worker keeps for one incarnation of one gateway."""

    def __init__(self, gateway_id: str, incarnation: str) -> None:
        self.gateway_id = gateway_id
        self.incarnation = incarnation
        self.requests: dict[int, Request] = {}
        # None while the stream is broken.
        self.attachment: GatewayAttachment | None = None
        # When the stream broke, in seconds on the sessions' clock.
        self.detached_at: float | None = None
        # Size of the histories of all requests, in plain tokens.
        self.kept_tokens = 0
        self._step = 0
        self._unsent: dict[int, Request] = {}

    def add(self, request: Request) -> None:
        """Raises InvalidRequest if the stream id is in use."""
        if request.stream_id in self.requests:
            raise InvalidRequest(f"stream_id {request.stream_id} is in use: never use one twice", field="stream_id")
        self.requests[request.stream_id] = request

    def mark_unsent(self, request: Request, step: int) -> None:
        """Put the request into the next frame. Call `wake` once all requests of a step are marked."""
        self._unsent[request.stream_id] = request
        self._step = step

    def restart_output(self) -> None:
        """A new stream begins: its first frame has only requests that are marked from now on."""
        self._unsent.clear()

    def wake(self) -> None:
        if self.attachment is not None:
            self.attachment.wake()

    def forget(self, stream_ids: Iterable[int]) -> list[Request]:
        """Drop requests and their histories; returns those that existed."""
        dropped = [request for stream_id in stream_ids if (request := self.requests.pop(stream_id, None)) is not None]
        for request in dropped:
            self._unsent.pop(request.stream_id, None)
            self.kept_tokens -= request.kept_tokens
        return dropped

    def take_frame(self) -> Frame | None:
        """The unsent output, up to the size of one frame; None if there is none."""
        if not self._unsent:
            return None
        outputs, budget = [], FRAME_TOKENS
        unsent, self._unsent = self._unsent, {}
        for request in unsent.values():
            if budget > 0:
                output = request.next_slice(max(1, budget // request.token_weight))
                outputs.append(output)
                budget -= output.weight(request.token_weight)
            # A request has more to send only if it did not fit, or not whole.
            if budget <= 0 and request.has_unsent:
                self._unsent[request.stream_id] = request
        return Frame(self._step, outputs)
