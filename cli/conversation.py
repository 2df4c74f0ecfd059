"""A conversation of several turns with a gateway, printed as it streams."""

import asyncio

import grpc
from deepmesh.v1 import gateway_pb2, gateway_pb2_grpc
from rich.console import Console

from cli.answers import Answer, chat_prompt, stream_grpc
from cli.terminal import show_on, until_first_text
from mesh.errors import DeadlineExceeded, EndpointUnavailable, MeshError, Retry
from mesh.rpc.channel import Channels

CONNECT_SECONDS = 5.0


class Conversation:
    """Owns the connection and the messages so far. `settings`: the request of every turn, without its prompt."""

    def __init__(
        self,
        endpoint: str,
        api_key: str | None,
        settings: gateway_pb2.GenerateRequest,
        messages: list[dict[str, str]],
        console: Console,
        channels: Channels,
    ) -> None:
        self._endpoint = endpoint
        self._metadata = [("authorization", f"Bearer {api_key}")] if api_key else []
        self._settings = settings
        self._messages = messages
        # The messages that `clear` keeps: the system message.
        self._lasting = list(messages)
        self._console = console
        self._channels = channels
        self._channel: grpc.aio.Channel | None = None

    async def connect(self) -> None:
        """Raises EndpointUnavailable, or the gateway's error if it refuses the API key."""
        self._channel = self._channels.open(self._endpoint)
        try:
            request = gateway_pb2.ListModelsRequest()
            await self._stub.ListModels(request, timeout=CONNECT_SECONDS, metadata=self._metadata)
        except MeshError as error:
            if error.retry is not Retry.THIS_CALL and not isinstance(error, DeadlineExceeded):
                raise
            message = f"no gateway answers at {self._endpoint}: is deepmesh up running? --endpoint names another"
            raise EndpointUnavailable(message) from error

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def ask(self, text: str) -> None:
        """Send `text` and print the answer. If it is cancelled or fails, the question is dropped from the
        conversation.
        """
        self._messages.append({"role": "user", "content": text})
        request = gateway_pb2.GenerateRequest()
        request.CopyFrom(self._settings)
        request.prompt.CopyFrom(chat_prompt(self._messages))
        answer = Answer()
        try:
            with until_first_text(self._console, show_on(self._console)) as show:
                await stream_grpc(self._stub, request, answer, show, self._metadata)
        except (MeshError, asyncio.CancelledError) as ended:
            self._messages.pop()
            if isinstance(ended, asyncio.CancelledError):
                self._console.print(" [stopped]", style="dim", markup=False)
            raise
        self._console.print()
        self._messages.append({"role": "assistant", "content": answer.text})

    def clear(self) -> None:
        """Forget all turns; a system message stays."""
        self._messages = list(self._lasting)

    @property
    def _stub(self) -> gateway_pb2_grpc.GatewayServiceStub:
        assert self._channel is not None
        return gateway_pb2_grpc.GatewayServiceStub(self._channel)
