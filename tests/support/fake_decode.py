"""A decode worker without an engine, over real gRPC: it writes tokens that depend on all tokens before them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from deepmesh.internal.v1 import decode_pb2, decode_pb2_grpc, outputs_pb2, sparse_prefill_pb2, workers_pb2
from deepmesh.v1 import common_pb2

from mesh.config import ServerConfig
from mesh.errors import MeshError, UnknownRequest, UnknownStream
from mesh.rpc.failures import to_failure
from mesh.rpc.server import MeshServer, Registration

VOCABULARY = 1000


def oracle_token(token_ids: Sequence[int]) -> int:
    """The next token after `token_ids`: lost, repeated or reordered ones change it. Never a control token's id."""
    value = len(token_ids)
    for token_id in token_ids[-8:]:
        value = (value * 31 + token_id + 1) % 1_000_003
    return 10 + value % 90


def oracle_tokens(prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(oracle_token(tokens))
    return tokens[len(prompt) :]


def scripted(answer: Sequence[int]) -> Callable[[int, Sequence[int]], int]:
    """Every request is answered with `answer`, then oracle tokens."""
    return lambda index, tokens: answer[index] if index < len(answer) else oracle_token(tokens)


@dataclass
class FakeRequest:
    submission: decode_pb2.Submission
    tokens: list[int]
    finished: common_pb2.FinishReason | None = None
    failure: MeshError | None = None
    # Position of the first token not sent on the present stream.
    sent: int = 0
    terminal_sent: bool = False

    @property
    def prompt_tokens(self) -> int:
        return len(self.submission.token_ids)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def live(self) -> bool:
        return self.finished is None and self.failure is None


@dataclass
class FakeDecodeWorker(decode_pb2_grpc.DecodeServiceServicer):
    """`async with worker.started():` listens. Tests set the public fields, and read what arrived."""

    worker_id: str = "decode-0"
    incarnation: str = "first"
    model: str = "oracle"
    context_tokens: int = 4096
    vocabulary_size: int = VOCABULARY
    can_prefill: bool = True
    # Absent: it computes long prompts exactly.
    sparse_prefill: sparse_prefill_pb2.SparsePrefill | None = None
    # So long that it does not end on a busy machine, and half as long as tests wait: tests of its end set it.
    grace_ms: int = 30_000
    step_seconds: float = 0.0
    tokens_per_step: int = 1
    # (index of the token in the whole answer of this submission, all tokens so far) -> token id.
    next_token: Callable[[int, Sequence[int]], int] = lambda index, tokens: oracle_token(tokens)
    eos_token_id: int | None = None
    # What its frames say of their answers.
    relaxed: bool = False
    # Given to submissions instead of work, one each.
    refusals: list[MeshError] = field(default_factory=list)
    # No token is written while it is clear.
    running: asyncio.Event = field(default_factory=asyncio.Event)
    requests: dict[int, FakeRequest] = field(default_factory=dict)
    submissions: list[decode_pb2.Submission] = field(default_factory=list)
    hellos: list[decode_pb2.AttachHello] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    acknowledged: list[int] = field(default_factory=list)
    port: int = 0

    def __post_init__(self) -> None:
        self.running.set()
        self._calls: set[asyncio.Task[None]] = set()
        self._broken: set[asyncio.Task[None]] = set()
        self._work = asyncio.Event()
        # Runs while no stream is up.
        self._grace: asyncio.TimerHandle | None = None
        self._step = 0
        # New streams are refused while it is set.
        self.unreachable = False
        # New streams are never welcomed while it is set.
        self.silent = False
        self._server: MeshServer | None = None

    async def stop(self) -> None:
        """Listen no more; what there was is cut off."""
        assert self._server is not None
        self.unreachable = True
        self.break_streams()
        await self._server.__aexit__(None, None, None)

    def identity(self) -> workers_pb2.WorkerIdentity:
        return workers_pb2.WorkerIdentity(
            worker_id=self.worker_id,
            incarnation=self.incarnation,
            role=workers_pb2.WORKER_ROLE_DECODE,
            endpoint=f"127.0.0.1:{self.port}",
            model=self.model,
            context_tokens=self.context_tokens,
            vocabulary_size=self.vocabulary_size,
            max_requests=64,
            can_prefill=self.can_prefill,
            sparse_prefill=self.sparse_prefill,
        )

    def started(self, port: int = 0) -> "StartedWorker":
        return StartedWorker(self, port)

    def break_streams(self) -> None:
        """End every stream; the requests live on."""
        self._broken |= self._calls
        for task in self._calls:
            task.cancel()

    def fail(self, failure: MeshError) -> None:
        """End every live request with `failure`."""
        for request in self.requests.values():
            if request.live:
                request.failure = failure
        # A frame may be under way that was made before.
        self._work.set()

    def restart(self, incarnation: str) -> None:
        """As a new process at the same address: nothing is left of the old one."""
        self.incarnation = incarnation
        self.requests.clear()
        self.break_streams()

    @property
    def reachable(self) -> bool:
        return not self.unreachable and not self.silent

    @property
    def live_requests(self) -> int:
        return sum(request.live for request in self.requests.values())

    async def Attach(self, requests: Any, context: Any) -> None:
        if self.unreachable:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "unreachable")
        if self.silent:
            await asyncio.Event().wait()
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        reader = None
        try:
            first = await context.read()
            self._resume(first.hello)
            welcome = decode_pb2.AttachWelcome(identity=self.identity(), grace_ms=self.grace_ms)
            await context.write(decode_pb2.AttachResponse(welcome=welcome))
            reader = asyncio.create_task(self._read(context))
            await self._write(context)
        except asyncio.CancelledError:
            if task not in self._broken:
                raise
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the stream was broken")
        finally:
            self._calls.discard(task)
            self._broken.discard(task)
            if reader is not None:
                reader.cancel()
            self._expect_return()

    def _expect_return(self) -> None:
        """Keep the requests for the grace: none of their gateway's streams is up."""
        self._end_grace()
        if not self._calls:
            self._grace = asyncio.get_running_loop().call_later(self.grace_ms / 1000, self.requests.clear)

    def _end_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def _resume(self, hello: decode_pb2.AttachHello) -> None:
        self._end_grace()
        self.hellos.append(hello)
        named = {point.stream_id: point.next_position for point in hello.resume}
        self.requests = {stream_id: request for stream_id, request in self.requests.items() if stream_id in named}
        for stream_id, position in named.items():
            request = self.requests.get(stream_id)
            if request is None:
                request = FakeRequest(decode_pb2.Submission(stream_id=stream_id), [], failure=UnknownRequest("unknown"))
                self.requests[stream_id] = request
            request.sent, request.terminal_sent = position, False
        self._work.set()

    async def TakeStream(self, request: Any, context: Any) -> None:
        raise UnknownStream("this worker keeps no logs")

    async def _read(self, context: Any) -> None:
        while (message := await context.read()) is not grpc.aio.EOF:
            match message.WhichOneof("message"):
                case "submission":
                    self._submit(message.submission)
                case "cancellation":
                    self.cancelled.append(message.cancellation.stream_id)
                    request = self.requests.get(message.cancellation.stream_id)
                    if request is not None and request.live:
                        request.finished = common_pb2.FINISH_REASON_CANCELLED
                case "acknowledgement":
                    self.acknowledged.extend(message.acknowledgement.stream_ids)
                    for stream_id in message.acknowledgement.stream_ids:
                        self.requests.pop(stream_id, None)
            self._work.set()

    def _submit(self, submission: decode_pb2.Submission) -> None:
        assert submission.stream_id not in self.requests
        self.submissions.append(submission)
        request = FakeRequest(submission, list(submission.token_ids), sent=len(submission.token_ids))
        if self.refusals:
            request.failure = self.refusals.pop(0)
        self.requests[submission.stream_id] = request

    async def _write(self, context: Any) -> None:
        while True:
            self._work.clear()
            await self.running.wait()
            self._advance()
            outputs = [output for key, request in self.requests.items() if (output := self._output(key, request))]
            if outputs:
                self._step += 1
                frame = decode_pb2.StepFrame(step=self._step, outputs=outputs)
                await context.write(decode_pb2.AttachResponse(frame=frame))
            if self.live_requests:
                await asyncio.sleep(self.step_seconds)
            else:
                await self._work.wait()

    def _advance(self) -> None:
        for request in self.requests.values():
            for _ in range(self.tokens_per_step):
                if request.live:
                    self.generate(request)

    def generate(self, request: FakeRequest) -> None:
        """Write one token, which may be the last."""
        token_id = self.next_token(request.generated, request.tokens)
        request.tokens.append(token_id)
        stop = request.submission.stop
        ends = not stop.ignore_eos and token_id == self.eos_token_id
        if ends or token_id in stop.token_ids:
            request.finished = common_pb2.FINISH_REASON_STOP
        elif request.generated >= stop.max_tokens:
            request.finished = common_pb2.FINISH_REASON_LENGTH

    def _output(self, stream_id: int, request: FakeRequest) -> decode_pb2.RequestOutput | None:
        tokens = request.tokens[request.sent :]
        ended = not request.live and not request.terminal_sent
        if not tokens and not ended:
            return None
        output = decode_pb2.RequestOutput(
            stream_id=stream_id,
            attempt=request.submission.attempt,
            first_position=request.sent,
            token_ids=tokens,
            cached_tokens=request.prompt_tokens // 64 * 64 if request.sent == request.prompt_tokens else None,
            finished=request.finished if ended else None,
            relaxed=self.relaxed,
            failure=to_failure(request.failure) if ended and request.failure is not None else None,
        )
        begins = bool(tokens) and output.first_position == (request.submission.prompt_tokens or request.prompt_tokens)
        if begins and request.submission.sampling.HasField("prompt_logprobs"):
            output.prompt_logprobs.CopyFrom(_scores(request.submission))
        if request.submission.sampling.HasField("top_logprobs"):
            output.logprobs.extend(_logprobs(token, request.submission.sampling.top_logprobs) for token in tokens)
        request.sent, request.terminal_sent = len(request.tokens), ended
        return output


def _logprobs(token_id: int, alternatives: int) -> common_pb2.PositionLogprobs:
    top = [common_pb2.TokenLogprob(token_id=token_id + n, logprob=-0.5 - n) for n in range(alternatives)]
    return common_pb2.PositionLogprobs(logprob=-0.5, top=top)


def _scores(submission: decode_pb2.Submission) -> outputs_pb2.PromptLogprobs:
    tokens, count = np.array(submission.token_ids[1:]), submission.sampling.prompt_logprobs
    tops = np.tile(np.arange(count, dtype=np.uint32), len(tokens))
    return outputs_pb2.PromptLogprobs(
        alternatives=count,
        logprobs=(-tokens.astype(np.float32)).tobytes(),
        ranks=(tokens.astype(np.uint32) + 1).tobytes(),
        top_token_ids=tops.tobytes(),
        top_logprobs=(-tops.astype(np.float32)).tobytes(),
    )


class StartedWorker:
    """The worker's server, for the length of a block."""

    def __init__(self, worker: FakeDecodeWorker, port: int) -> None:
        registration = Registration(
            decode_pb2_grpc.add_DecodeServiceServicer_to_server, worker, "deepmesh.internal.v1.DecodeService"
        )
        self._worker = worker
        self._server = MeshServer(ServerConfig(port=port, drain_seconds=0), "fake decode", [registration])

    async def __aenter__(self) -> FakeDecodeWorker:
        await self._server.__aenter__()
        self._worker.port, self._worker._server = self._server.port, self._server
        return self._worker

    async def __aexit__(self, *error: Any) -> None:
        self._worker.unreachable = True
        await self._server.__aexit__(None, None, None)
