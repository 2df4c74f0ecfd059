"""POST /v1/messages/count_tokens: the length of a prompt, without an answer."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from gateway.gateway import Gateway
from gateway.messages.body import PromptBody
from gateway.messages.errors import failure_response
from gateway.messages.output import TokenCount
from gateway.openai.body import read_body
from gateway.openai.endpoint import credential
from gateway.openai.parsing import parse
from mesh.errors import MeshError


class TokenCounter:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def count(self, request: Request) -> Response:
        try:
            return Response(msgspec.json.encode(await self._count(request)), media_type="application/json")
        except MeshError as error:
            return failure_response(error)

    async def _count(self, request: Request) -> TokenCount:
        self._gateway.tenants.authenticate(credential(request.headers))
        http = self._gateway.config.http
        content = await read_body(self._gateway, request.headers, request.receive)
        body = parse(PromptBody, content, ignore_unknown=http.unknown_fields == "ignore").body
        body.refuse()
        return TokenCount(len(await self._gateway.intake.count(body.model, body.prompt(), body.form())))
