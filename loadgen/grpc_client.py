"""A load client for deepmesh gateways: streamed `Generate` over gRPC."""

import grpc
from deepmesh.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

from loadgen.client import Clock, Target
from loadgen.options import LoadOptions
from loadgen.records import RequestRecord
from loadgen.workload import Answer, Job, Message
from mesh.errors import EndpointUnavailable, MeshError, Retry, Unauthenticated, UnknownModel
from mesh.rpc.channel import Channels
from mesh.rpc.failures import from_rpc_error


class GrpcClient:
    """Speaks to the GatewayService at `options.grpc`, over one connection."""

    def __init__(self, options: LoadOptions, channels: Channels) -> None:
        assert options.grpc is not None
        self._options = options
        self._model = options.model
        self._metadata = [("authorization", f"Bearer {options.api_key}")] if options.api_key else []
        self._channel = channels.open(options.grpc)
        self._stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)

    async def discover(self) -> Target:
        request = gateway_pb2.ListModelsRequest()
        try:
            response = await self._stub.ListModels(request, timeout=10.0, metadata=self._metadata)
        except Unauthenticated:
            raise
        except MeshError as error:
            endpoint = self._options.grpc
            message = f"{endpoint} does not answer as a deepmesh gateway does: {error.message}"
            if error.retry is Retry.THIS_CALL:
                message = f"no gateway answers at {endpoint}: is deepmesh up running? --endpoint names another"
            raise EndpointUnavailable(message) from error
        found = next((model for model in response.models if self._model in (None, model.name)), None)
        if found is None:
            names = ", ".join(model.name for model in response.models) or "none"
            raise UnknownModel(f"{self._options.grpc} does not serve model {self._model!r}; it serves: {names}")
        self._model = found.name
        return Target(found.name, found.vocabulary_size or None)

    async def send(self, job: Job, record: RequestRecord, clock: Clock) -> Answer:
        request = self._request(job)
        token_ids: list[int] = []
        try:
            call = self._stub.Generate(request, timeout=self._options.timeout_s, metadata=self._metadata)
            while (response := await call.read()) is not grpc.aio.EOF:
                self._note(response, record, clock())
                # Empty unless they were asked for.
                token_ids += response.delta.token_ids
            if record.finished_s is None:
                record.fail("incomplete", "the stream ended before `finished`")
        except grpc.aio.AioRpcError as error:
            failure = from_rpc_error(error)
            record.fail(failure.reason, failure.message)
        return Answer(token_ids=tuple(token_ids))

    async def close(self) -> None:
        await self._channel.close()

    def _request(self, job: Job) -> gateway_pb2.GenerateRequest:
        return gateway_pb2.GenerateRequest(
            model=self._model or "",
            prompt=_prompt(job),
            sampling=common_pb2.SamplingParams(temperature=self._options.temperature),
            max_tokens=job.max_tokens,
            ignore_eos=job.exact if self._options.ignore_eos is None else self._options.ignore_eos,
            return_token_ids=job.following is not None,
        )

    def _note(self, response: gateway_pb2.GenerateResponse, record: RequestRecord, now_s: float) -> None:
        match response.WhichOneof("event"):
            case "started":
                record.request_id = response.started.request_id
                record.prompt_tokens = response.started.prompt_tokens
            case "delta" if response.delta.token_count:
                record.tokens(now_s, response.delta.token_count)
            case "finished":
                record.finished_s = now_s
                record.output_tokens = response.finished.usage.completion_tokens
                usage = response.finished.usage
                record.cached_tokens, record.host_cached_tokens = usage.cached_tokens, usage.host_cached_tokens
                record.store_cached_tokens = usage.store_cached_tokens


def _prompt(job: Job) -> gateway_pb2.Prompt:
    prompt = job.prompt
    if isinstance(prompt, str):
        return gateway_pb2.Prompt(text=prompt)
    # The first item tells: prompts are long, and others are in flight.
    if not isinstance(prompt[0], Message):
        return gateway_pb2.Prompt(token_ids=gateway_pb2.TokenIds(ids=prompt))
    messages = [gateway_pb2.ChatMessage(role=each.role, content=each.content) for each in prompt]
    return gateway_pb2.Prompt(chat=gateway_pb2.Chat(messages=messages))
