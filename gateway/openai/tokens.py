"""Endpoints that turn text into token ids and back, without generating anything."""

from msgspec import Struct, json
from starlette.requests import Request
from starlette.responses import Response

from gateway.asks import ChatPrompt, Prompt, TextPrompt
from gateway.gateway import Gateway
from gateway.intake import no_tokenizer
from gateway.openai.answer_bodies import Detokenized, Tokenized
from gateway.openai.body import read_body
from gateway.openai.chat_messages import Message, chat_messages
from gateway.openai.endpoint import credential
from gateway.openai.parsing import parse
from gateway.openai.requests import TemplateFields, template_options
from gateway.prompts.tokenizer import Tokenizer
from mesh.domain.sampling import check_token_ids
from mesh.errors import InvalidRequest


class TokenizeBody(Struct, forbid_unknown_fields=True):
    """A raw prompt, or messages for the chat template."""

    model: str = ""
    prompt: str | None = None
    messages: list[Message] | None = None
    chat_template_kwargs: TemplateFields | None = None
    # Put the model's beginning-of-sequence token before a raw prompt, as completions do.
    add_special_tokens: bool = True
    return_token_strs: bool = False

    def to_prompt(self) -> Prompt:
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("send either prompt or messages", field="prompt")
        if self.prompt is not None:
            return TextPrompt(self.prompt, self.add_special_tokens)
        return ChatPrompt(chat_messages(self.messages or ()), template_options(self.chat_template_kwargs))


class DetokenizeBody(Struct, forbid_unknown_fields=True):
    tokens: list[int]
    model: str = ""


class TokenRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def tokenize(self, request: Request) -> Response:
        body = parse(TokenizeBody, await self._content(request)).body
        model = self._gateway.catalog.resolve(body.model)
        token_ids = list(await self._gateway.intake.count(model, body.to_prompt()))
        spelled = self._tokenizer(model).token_texts(token_ids) if body.return_token_strs else None
        context = self._gateway.catalog.limits(model).context_tokens
        return _answer(Tokenized(len(token_ids), context, token_ids, spelled))

    async def detokenize(self, request: Request) -> Response:
        body = parse(DetokenizeBody, await self._content(request)).body
        model = self._gateway.catalog.resolve(body.model)
        limits = self._gateway.catalog.limits(model)
        # Bounds the answer: the text of one token may have a hundred bytes.
        if len(body.tokens) > limits.context_tokens:
            message = (
                f"tokens holds {len(body.tokens)} ids, and the model's context {limits.context_tokens}: send fewer"
            )
            raise InvalidRequest(message, field="tokens")
        check_token_ids(body.tokens, limits.vocabulary_size, field="tokens")
        return _answer(Detokenized(self._tokenizer(model).spell(body.tokens)))

    async def _content(self, request: Request) -> bytes:
        """The body, if its client has a valid key. Raises Unauthenticated, and what `read_body` raises."""
        self._gateway.tenants.authenticate(credential(request.headers))
        return await read_body(self._gateway, request.headers, request.receive)

    def _tokenizer(self, model: str) -> Tokenizer:
        tokenizer = self._gateway.catalog.text(model).tokenizer
        if tokenizer is None:
            raise no_tokenizer(model, "tokens")
        return tokenizer


def _answer(body: Struct) -> Response:
    return Response(json.encode(body), media_type="application/json")
