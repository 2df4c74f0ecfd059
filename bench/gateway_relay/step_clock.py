"""When steps happened, observed outside the path under test, and how much later tokens came on that path.

An extra stream, straight from the process that makes the steps, has a token in every step of the measured streams.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
from deepmesh.internal.v1 import decode_pb2, decode_pb2_grpc
from deepmesh.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

from bench.gateway_relay.token_streams import MAX_TOKENS, PROMPT_TOKENS
from mesh.rpc.channel import Channels

STREAM_ID = 1


def added_latencies(token_times: Sequence[float], step_times: Sequence[float]) -> list[float]:
    """Seconds from each token's step to its arrival, for one stream that gets a token in every step.

    The tokens are matched with consecutive steps, so that most tokens lie nearest to their own step. A token that
    arrives after the next step therefore still counts from its own. Tokens before the first known step, or after the
    last, are dropped.
    """
    tokens, steps = np.asarray(token_times), np.asarray(step_times)
    middles = (steps[1:] + steps[:-1]) / 2
    nearest = np.searchsorted(middles, tokens)
    first_step = int(np.median(nearest - np.arange(len(tokens))))
    own = np.arange(len(tokens)) + first_step
    known = (own >= 0) & (own < len(steps))
    latencies: list[float] = (tokens[known] - steps[own[known]]).tolist()
    return latencies


@asynccontextmanager
async def source_steps(source: str) -> AsyncIterator[list[float]]:
    """The times at which a paced token source made its steps, as its messages say."""
    times: list[float] = []
    async with Channels().open(source) as channel:
        call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(gateway_pb2.GenerateRequest())

        async def follow() -> None:
            async for response in call:
                instant = float(response.delta.text)
                times.append(instant)

        following = asyncio.create_task(follow())
        try:
            yield times
        finally:
            call.cancel()
            await asyncio.gather(following, return_exceptions=True)


@asynccontextmanager
async def engine_steps(decode: str) -> AsyncIterator[list[float]]:
    """Attach to a decode worker as one more gateway, with one endless request; the list gets each token's arrival.

    That is one hop after the step was sent.
    """
    times: list[float] = []
    async with Channels().open(decode) as channel:
        call = decode_pb2_grpc.DecodeServiceStub(channel).Attach()
        hello = decode_pb2.AttachHello(gateway_id="step-clock", gateway_incarnation=uuid.uuid4().hex)
        await call.write(decode_pb2.AttachRequest(hello=hello))
        await call.write(decode_pb2.AttachRequest(submission=_submission()))

        async def follow() -> None:
            async for response in call:
                now = time.perf_counter()
                for output in response.frame.outputs:
                    assert not output.HasField("failure"), output.failure.message
                    times.extend([now] * len(output.token_ids))

        following = asyncio.create_task(follow())
        try:
            yield times
        finally:
            call.cancel()
            await asyncio.gather(following, return_exceptions=True)


def _submission() -> decode_pb2.Submission:
    return decode_pb2.Submission(
        stream_id=STREAM_ID,
        request_id="step-clock",
        attempt=1,
        token_ids=range(1, PROMPT_TOKENS + 1),
        sampling=common_pb2.SamplingParams(temperature=0.0, top_p=1.0),
        stop=decode_pb2.StopConditions(max_tokens=MAX_TOKENS, ignore_eos=True),
    )
