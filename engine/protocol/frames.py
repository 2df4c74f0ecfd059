"""Messages on the Unix socket between a service and its rank: 4 bytes of length (little endian), then msgpack."""

import struct
from typing import Any, Generic, TypeVar

import msgspec

from mesh.errors import EngineFailed

HEADER = struct.Struct("<I")
# Far above any message of ours (a prompt of a million tokens is 5 MB): a longer one means that the two sides disagree.
MAX_FRAME_BYTES = 64 * 1024 * 1024
RECEIVE_BYTES = 256 * 1024

MessageT = TypeVar("MessageT")


class FrameEncoder:
    """One side's way out. Reuses one buffer: what `encode` returns is valid until its next call."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._frame = bytearray()

    def encode(self, message: msgspec.Struct) -> bytearray:
        self._encoder.encode_into(message, self._frame, HEADER.size)
        size = len(self._frame) - HEADER.size
        assert size <= MAX_FRAME_BYTES
        HEADER.pack_into(self._frame, 0, size)
        return self._frame


class FrameDecoder(Generic[MessageT]):
    """One side's way in: received bytes become messages of `message_type`, a union of tagged structs."""

    def __init__(self, message_type: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(message_type)
        self._received = bytearray()

    def feed(self, data: bytes) -> list[MessageT]:
        """Every message that `data` completes. Raises EngineFailed on bytes that the other side cannot have meant."""
        self._received += data
        messages = []
        start = 0
        with memoryview(self._received) as received:
            while len(received) - start >= HEADER.size:
                body = start + HEADER.size
                (size,) = HEADER.unpack_from(received, start)
                if size > MAX_FRAME_BYTES:
                    raise EngineFailed(f"a frame of {size} bytes on the engine's socket; at most {MAX_FRAME_BYTES}")
                if len(received) - body < size:
                    break
                messages.append(self._decode(received[body : body + size]))
                start = body + size
        del self._received[:start]
        return messages

    def _decode(self, body: memoryview) -> MessageT:
        try:
            return self._decoder.decode(body)
        except msgspec.DecodeError as error:
            raise EngineFailed(f"a frame on the engine's socket is none of its messages: {error}") from error
        finally:
            body.release()
