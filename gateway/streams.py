"""Streams that can be resumed: named for their clients, logged by their workers, and continued here.

A worker keeps a request's tokens while it runs and for a time after its end; the client's gateway may be gone by then.
Whoever shows a stream's token becomes its owner: the workers end the stream for its previous owner and hand over their
logs. The rest is generated as after the loss of a worker, from the prompt and the tokens so far.
"""

import secrets
import time
from array import array
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import sha256

import msgspec

from gateway.catalog import Catalog
from gateway.config import ResumeConfig
from gateway.links.stream_log_link import StreamLogs, TakenLog
from gateway.links.workers import WorkerDirectory
from gateway.prepared import History, Prepared, TextReading
from gateway.stream_tokens import ID_BYTES, StreamClaim, StreamSeal, request_digest
from gateway.text.reasoning import ReasoningStart
from gateway.text.signs import NO_SIGNS
from gateway.text.transcript import Transcript, no_text
from mesh.blocks import chain_hashes
from mesh.domain.requests import StreamTag
from mesh.errors import InvalidRequest, StreamGone
from mesh.rpc.channel import Channels


class StreamContext(msgspec.Struct, frozen=True):
    """What another gateway needs in addition to the request. Workers store it without reading it."""

    model: str
    text: TextReading
    # The API's record of how the client reads the answer.
    written: bytes
    form_field: str | None = None


class Streams:
    def __init__(self, config: ResumeConfig, catalog: Catalog, directory: WorkerDirectory, channels: Channels) -> None:
        secret = config.secret.get_secret_value() if config.secret is not None else None
        self._seal = StreamSeal(secret)
        self._seconds = config.seconds
        self._catalog = catalog
        self._directory = directory
        self._logs = StreamLogs(channels)

    def named(self, prepared: Prepared, tenant: str, written: bytes | None) -> Prepared:
        """The request with a stream's name and token. It gets neither if its answer is more than text and tokens, or if
        no gateway could resume it.
        """
        if written is None or prepared.text is None:
            return prepared
        sampling = prepared.request.sampling
        if prepared.echo or sampling.top_logprobs is not None or sampling.prompt_logprobs is not None:
            return prepared
        claim = StreamClaim(
            stream_id=secrets.token_bytes(ID_BYTES),
            tenant=tenant,
            model=prepared.model,
            weights=self._weights(prepared.model),
            request=request_digest(prepared.request),
            seed=prepared.request.sampling.seed,
            expires_at=int(time.time() + self._seconds),
        )
        context = StreamContext(prepared.model, prepared.text, written, prepared.form_field)
        tag = StreamTag(claim.stream_id, 0, msgspec.msgpack.encode(context))
        return replace(prepared, stream=tag, stream_token=self._seal.seal(claim))

    def claim(self, token: str, tenant: str) -> StreamClaim:
        """The claim in a token. Raises UnknownStream for an invalid token, and StreamGone if the model has other
        weights now.
        """
        claim = self._seal.open(token, tenant, time.time())
        # Without a worker there is nothing to compare: one may be starting.
        if self._directory.kv_namespaces(claim.model) and claim.weights != self._weights(claim.model):
            raise StreamGone("the model was replaced since the stream began: send the request as a new one")
        return claim

    async def take(self, claim: StreamClaim, position: int, token: str) -> tuple[Prepared, bytes] | None:
        """The request, to be continued after `position` tokens, and how the API writes it; None if no worker has a
        log.
        """
        targets = self._directory.decode_targets(claim.model)
        logs = await self._logs.take(targets, claim.stream_id)
        if not logs:
            return None
        return self._restored(max(logs, key=lambda log: log.order), position, token)

    def begun_again(
        self, prepared: Prepared, claim: StreamClaim, position: int, token: str, written: bytes
    ) -> Prepared:
        """The stream's request, computed again from its prompt. Raises InvalidRequest if `prepared` is a different
        request.
        """
        if (prepared.model, request_digest(prepared.request)) != (claim.model, claim.request):
            raise InvalidRequest("this is not the request that the stream belongs to: send the same one")
        context = StreamContext(prepared.model, prepared.text or TextReading(), written, prepared.form_field)
        # Higher than any epoch that a gateway would have reached by resuming the stream.
        tag = StreamTag(claim.stream_id, 1 << 16, msgspec.msgpack.encode(context))
        return replace(prepared, stream=tag, stream_token=token, history=History(array("I"), None, position))

    def _weights(self, model: str) -> bytes:
        namespaces = sorted(map(msgspec.msgpack.encode, self._directory.kv_namespaces(model)))
        return sha256(b"".join(namespaces)).digest()[:ID_BYTES]

    def _restored(self, log: TakenLog, position: int, token: str) -> tuple[Prepared, bytes]:
        submission = log.submission
        assert submission.stream is not None
        context = msgspec.msgpack.decode(submission.stream.context, type=StreamContext)
        request, received = submission.request, array("I")
        prompt = len(request.token_ids) if request.prompt_tokens is None else request.prompt_tokens
        received.extend(request.token_ids[prompt:])
        stop = msgspec.structs.replace(request.stop, max_tokens=request.stop.max_tokens + len(received))
        received.extend(log.token_ids)
        original = msgspec.structs.replace(
            request, token_ids=array("I", request.token_ids[:prompt]), stop=stop, prompt_tokens=None, attempt=0
        )
        prepared = Prepared(
            context.model,
            original,
            self._transcripts(context),
            chain_hashes(original.token_ids, original.cache_salt, original.sparse),
            text=context.text,
            stream=msgspec.structs.replace(submission.stream, epoch=submission.stream.epoch + 1),
            stream_token=token,
            history=History(received, log.reason, position, log.relaxed),
            form_field=context.form_field,
        )
        return prepared, context.written

    def _transcripts(self, context: StreamContext) -> Callable[[], Transcript]:
        tokenizer, text = self._catalog.text(context.model).tokenizer, context.text
        token_bytes = no_text if tokenizer is None else tokenizer.token_bytes
        reasoning = ReasoningStart(text.reasoning)
        return partial(
            Transcript,
            token_bytes,
            text.stop_strings,
            reasoning,
            include_stop_string=text.include_stop_string,
            closed_by=text.closed_by,
            signs=NO_SIGNS if tokenizer is None else tokenizer.signs,
        )
