"""The same streams over OpenAI's HTTP API, as server-sent events."""

import asyncio
import json
import re

from bench.gateway_relay.token_streams import MAX_TOKENS, TokenStreams, prompt_of
from bench.meshes.oracle_mesh import MODEL
from mesh.errors import EndpointUnavailable

EVENT_END = b"\n\n"
TOKEN_IDS = re.compile(rb'"token_ids":\[([^]]+)]')
READ_BYTES = 65536


class EventStreams(TokenStreams):
    """Completions, with a connection for each. Events are only searched for token ids: parsing would cost the client
    time, which is not what the bench measures.
    """

    async def _read(self, index: int) -> None:
        host, _, port = self._endpoint.rpartition(":")
        reader, writer = await asyncio.open_connection(host, port)
        try:
            writer.write(_request(index))
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise EndpointUnavailable(f"{self._endpoint} answered {head.splitlines()[0].decode()}")
            rest = b""
            while read := await reader.read(READ_BYTES):
                whole, _, rest = (rest + read).rpartition(EVENT_END)
                for token_ids in TOKEN_IDS.findall(whole):
                    self._note(index, token_ids.count(b",") + 1)
        except OSError as error:
            raise EndpointUnavailable(f"{self._endpoint} broke a stream: {error}") from error
        finally:
            writer.close()


def _request(index: int) -> bytes:
    body = json.dumps(
        {
            "model": MODEL,
            "prompt": prompt_of(index),
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
    ).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
