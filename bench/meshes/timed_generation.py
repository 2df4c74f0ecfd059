"""One greedy request over gRPC, and when each of its tokens came."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import grpc
from deepmesh.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

from mesh.rpc.failures import from_rpc_error


@dataclass(slots=True)
class TimedGeneration:
    """Times in seconds of time.perf_counter; tokens of one message share theirs."""

    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    cached_tokens: int = 0

    def after_sending(self, token: int) -> float:
        """Seconds from sending the request to the token with that index."""
        return self.times[token] - self.sent

    def gaps(self) -> list[float]:
        """Seconds between successive tokens."""
        return [later - earlier for earlier, later in pairwise(self.times)]


async def generate(
    stub: gateway_pb2_grpc.GatewayServiceStub,
    prompt: Sequence[int],
    max_tokens: int,
    result: TimedGeneration | None = None,
) -> TimedGeneration:
    """Generate exactly `max_tokens`. If `result` is given, it is filled as tokens come. Raises MeshError."""
    result = result or TimedGeneration()
    request = gateway_pb2.GenerateRequest(
        prompt=gateway_pb2.Prompt(token_ids=gateway_pb2.TokenIds(ids=prompt)),
        sampling=common_pb2.SamplingParams(temperature=0.0),
        max_tokens=max_tokens,
        ignore_eos=True,
    )
    result.sent = time.perf_counter()
    try:
        call = stub.Generate(request)
        while (response := await call.read()) is not grpc.aio.EOF:
            result.times.extend([time.perf_counter()] * response.delta.token_count)
            if response.HasField("finished"):
                result.cached_tokens = response.finished.usage.cached_tokens
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return result
