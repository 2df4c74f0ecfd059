"""The routes of the Responses API: new answers, and access to stored ones."""

from functools import partial

import msgspec
from msgspec import Raw, Struct
from starlette.requests import Request
from starlette.responses import Response

from gateway.gateway import Gateway
from gateway.openai.endpoint import Endpoint, credential
from gateway.openai.form import Form
from gateway.prompts.tokenizer import Tokenizer
from gateway.responses.body import ResponseRequest
from gateway.responses.form import ResponsesForm
from gateway.responses.items import InputItem, answered, items_of, messages_of, remembered
from gateway.responses.output import Deleted
from gateway.responses.output import Response as ResponseBody
from gateway.responses.store import Conversation, ResponseStore
from gateway.tenants import Tenant
from mesh.errors import (
    InvalidRequest,
    PreviousResponseNotFound,
    ResponsesUnavailable,
    UnknownResponse,
    Unsupported,
)

NOTHING_IS_STORED = "no response is stored here (the gateway has no responses.redis_url)"
# Query parameters of GET, with the values that ask for nothing that we lack.
HARMLESS = {"stream": ("false",), "include_obfuscation": ("true", "false")}


class ResponsesEndpoint(Endpoint[ResponseRequest]):
    def __init__(self, gateway: Gateway) -> None:
        super().__init__(gateway, ResponseRequest, ResponsesForm.of)
        self._store = gateway.responses

    async def _completed(self, body: ResponseRequest, tenant: Tenant) -> ResponseRequest:
        """The request, with the conversation that it continues before its own items."""
        # Check the request's own items first: errors then name their own indices, and nothing is looked up in vain.
        messages_of(body.instructions, body.input)
        if self._store is None:
            self._refuse_to_store(body)
            return body
        if body.previous_response_id is None:
            return body
        earlier = await self._store.find(tenant.name, body.previous_response_id)
        if earlier is None:
            raise PreviousResponseNotFound(
                f"no response {body.previous_response_id!r}: it expired, was deleted or not stored",
                field="previous_response_id",
            )
        return msgspec.structs.replace(body, input=[*earlier.items, *items_of(body.input)])

    def _form(self, body: ResponseRequest, tenant: Tenant, model: str, tokenizer: Tokenizer | None) -> Form:
        form = ResponsesForm.of(body, model, tokenizer)
        store = self._store
        if store is None or body.store is False:
            return form
        items = remembered(items_of(body.input))
        size = len(msgspec.json.encode(Conversation(items, Raw(form.so_far()))))
        if size <= store.largest:
            return form.kept_by(partial(_keep, store, tenant.name, items))
        if body.store:
            wrong = f"the conversation has {size} bytes, and at most {store.largest} are stored: send store: false"
            raise InvalidRequest(wrong, field="store")
        return form

    @staticmethod
    def _refuse_to_store(body: ResponseRequest) -> None:
        if body.previous_response_id is not None:
            why = f"previous_response_id is not supported: {NOTHING_IS_STORED}; send the items of earlier ones"
            raise Unsupported(why, field="previous_response_id")
        if body.store:
            raise Unsupported(f"store is not supported: {NOTHING_IS_STORED}; leave it out", field="store")


class StoredResponses:
    """GET and DELETE /v1/responses/{response_id}."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def get(self, request: Request) -> Response:
        tenant, store = self._reached(request)
        for name, value in request.query_params.multi_items():
            if value not in HARMLESS.get(name, ()):
                raise Unsupported(f"{name}={value} is not supported: leave it out", field=name)
        response_id = request.path_params["response_id"]
        found = await store.find(tenant.name, response_id)
        if found is None:
            raise _unknown(response_id)
        return Response(bytes(found.response), media_type="application/json")

    async def delete(self, request: Request) -> Response:
        tenant, store = self._reached(request)
        response_id = request.path_params["response_id"]
        if not await store.forget(tenant.name, response_id):
            raise _unknown(response_id)
        return _json(Deleted(response_id))

    def _reached(self, request: Request) -> tuple[Tenant, ResponseStore]:
        tenant = self._gateway.tenants.authenticate(credential(request.headers))
        store = self._gateway.responses
        if store is None:
            raise UnknownResponse(NOTHING_IS_STORED)
        return tenant, store


async def _keep(store: ResponseStore, tenant: str, items: list[InputItem], response: ResponseBody) -> bool:
    """Whether the response was stored. The client gets the answer in either case; its field `store` tells which."""
    conversation = Conversation([*items, *answered(response.output)], Raw(msgspec.json.encode(response)))
    try:
        await store.keep(tenant, response.id, conversation)
    except ResponsesUnavailable:
        return False
    return True


def _unknown(response_id: str) -> UnknownResponse:
    return UnknownResponse(f"no response {response_id!r}: it expired, was deleted or not stored")


def _json(body: Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
