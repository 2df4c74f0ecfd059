"""PrefillService over loopback gRPC, with a rank that does what each test says."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from deepmesh.v1 import common_pb2

from engine.protocol.messages import Output, Refusal
from mesh.domain.outputs import FinishReason, Logprobs
from mesh.domain.workers import WorkerRole, WorkerState
from mesh.errors import (
    ContextExceeded,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    MeshError,
    NamespaceMismatch,
    PushFailed,
    WorkerDraining,
    WorkerFull,
)
from mesh.observe.metrics import PREFILL_ENDED
from mesh.rpc.channel import Channels
from prefill_svc.__main__ import SERVICE
from tests.support.fake_rank import TRANSFER_READY
from tests.support.metric_values import value_of
from tests.support.prefilling import (
    PrefillCaller,
    RunningPrefill,
    make_ticket,
    prefill_caller,
    prefill_config,
    prefill_request,
    prefill_without_rank,
    serving,
)
from tests.support.waiting import eventually
from transfer.events import PushEnded
from transfer.ticket import Ticket

PROMPT = [number % 100 for number in range(150)]
TRANSFER = (1).to_bytes(16, "big")


def ended(outcome: str) -> float:
    return value_of(PREFILL_ENDED.labels(outcome))


async def accepted(running: RunningPrefill, caller: PrefillCaller, **fields: Any) -> int:
    """Start PROMPT; returns the rank's key of it."""
    before = set(running.rank.submitted)
    caller.start(prefill_request(PROMPT, **fields))
    assert (await caller.next()).WhichOneof("message") == "accepted"
    (key,) = set(running.rank.submitted) - before
    return key


def first_token(running: RunningPrefill, key: int, **fields: Any) -> None:
    running.rank.emit(running.rank.step(Output(key, len(PROMPT), [42], finish=FinishReason.LENGTH, **fields)))


async def test_a_prompt_is_accepted_computed_and_pushed() -> None:
    done_before = ended("done")
    async with prefill_without_rank() as running, prefill_caller(running.endpoint) as caller:
        store = {"store_id": "s", "blocks": 2}
        caller.start(prefill_request(PROMPT, cache_salt=b"salt", store=store, prompt_tokens=120))
        assert (await caller.next()).HasField("accepted")
        submit = running.rank.submitted[0]
        request = submit.request
        assert (request.token_ids, request.stop.max_tokens, request.cache_salt) == (PROMPT, 1, b"salt")
        assert request.prompt_tokens == 120
        assert submit.push is not None
        assert (submit.push.ticket, submit.push.held_blocks) == (make_ticket(150), 0)
        assert submit.fetch is not None
        assert (submit.fetch.store_id, submit.fetch.blocks) == ("s", 2)
        first_token(running, 0, cached_tokens=128, store_cached_tokens=64, host_cached_tokens=32)
        message = (await caller.next()).first_token
        assert (message.token_id, message.worker_cached_tokens, message.store_cached_tokens) == (42, 64, 64)
        assert message.host_cached_tokens == 32
        running.rank.emit(PushEnded(TRANSFER, 1536, "tcp"))
        done = (await caller.next()).done
        assert (done.pushed_bytes, done.transport) == (1536, "tcp")
        assert await caller.ended() is None
    assert ended("done") == done_before + 1


async def test_a_pushs_end_is_reported_after_the_first_token() -> None:
    async with prefill_without_rank() as running, prefill_caller(running.endpoint) as caller:
        key = await accepted(running, caller)
        running.rank.emit(PushEnded(TRANSFER, 512, "tcp"))
        first_token(running, key)
        kinds = [(await caller.next()).WhichOneof("message") for _ in range(2)]
        assert kinds == ["first_token", "done"]


async def test_log_probabilities_of_the_first_token_come_with_it() -> None:
    async with prefill_without_rank() as running, prefill_caller(running.endpoint) as caller:
        key = await accepted(running, caller, sampling=common_pb2.SamplingParams(top_logprobs=1))
        assert running.rank.submitted[key].request.sampling.top_logprobs == 1
        first_token(running, key, logprobs=[Logprobs(-0.5, [42], [-0.5])])
        message = (await caller.next()).first_token
        assert (message.logprobs.logprob, message.logprobs.top[0].token_id) == (-0.5, 42)


def changed(**changes: Any) -> Callable[[Ticket], Ticket]:
    return lambda ticket: msgspec.structs.replace(ticket, **changes)


def with_segment(which: int, /, **changes: Any) -> Callable[[Ticket], Ticket]:
    def change(ticket: Ticket) -> Ticket:
        segments = list(ticket.segments)
        segments[which] = msgspec.structs.replace(segments[which], **changes)
        return msgspec.structs.replace(ticket, segments=tuple(segments))

    return change


NAMESPACE = TRANSFER_READY.namespace
BAD_TICKETS: list[tuple[str, Callable[[Ticket], Ticket], type[MeshError]]] = [
    ("another namespace", changed(namespace=msgspec.structs.replace(NAMESPACE, dtype="bfloat16")), NamespaceMismatch),
    (
        "other weights",
        changed(namespace=msgspec.structs.replace(NAMESPACE, weights_fingerprint="x")),
        NamespaceMismatch,
    ),
    ("small blocks", changed(namespace=msgspec.structs.replace(NAMESPACE, block_tokens=32)), InvalidRequest),
    ("no transfer id", changed(transfer_id=b""), InvalidRequest),
    ("a short secret", changed(secret=b"short"), InvalidRequest),
    ("no deadline", changed(deadline_ms=0), InvalidRequest),
    ("a deadline of a day", changed(deadline_ms=86_400_000), InvalidRequest),
    ("no segments", changed(segments=()), InvalidRequest),
    ("too many segments", lambda ticket: changed(segments=ticket.segments * 2)(ticket), InvalidRequest),
    ("too few segments", lambda ticket: changed(segments=ticket.segments[:2])(ticket), InvalidRequest),
    ("a segment twice", with_segment(1, first_block=0), InvalidRequest),
    ("a segment past the landing", with_segment(2, first_block=3), InvalidRequest),
    ("a segment past the layers", with_segment(0, first_layer=1), InvalidRequest),
    ("a segment without blocks", with_segment(0, block_count=0, size_bytes=0), InvalidRequest),
    ("a segment of another size", with_segment(0, size_bytes=513), InvalidRequest),
    ("a huge segment", with_segment(0, block_count=2**32 - 1, size_bytes=512 * (2**32 - 1)), InvalidRequest),
    ("a segment out of order", with_segment(0, index=1), InvalidRequest),
    ("a segment of another rank", with_segment(0, destination_rank=1), InvalidRequest),
    ("tags that are not a landing's", changed(tag=2**64 - 1), InvalidRequest),
    ("a segment with the address of another rank", with_segment(1, worker_address=b"another"), InvalidRequest),
    ("a segment with no address", with_segment(0, worker_address=b""), InvalidRequest),
]


async def test_a_landing_on_any_one_rank_is_pushed_into() -> None:
    landing = make_ticket(150)
    segments = tuple(msgspec.structs.replace(segment, destination_rank=3) for segment in landing.segments)
    async with prefill_without_rank() as running, prefill_caller(running.endpoint) as caller:
        key = await accepted(running, caller, ticket=msgspec.structs.replace(landing, segments=segments))
        push = running.rank.submitted[key].push
        assert push is not None
        assert push.ticket.segments == segments


@pytest.mark.parametrize(
    ("change", "expected"), [case[1:] for case in BAD_TICKETS], ids=[case[0] for case in BAD_TICKETS]
)
async def test_a_ticket_that_does_not_fit_is_refused(
    change: Callable[[Ticket], Ticket], expected: type[MeshError]
) -> None:
    before = ended(expected.reason)
    async with prefill_without_rank() as running, prefill_caller(running.endpoint) as caller:
        caller.start(prefill_request(PROMPT, change(make_ticket(150))))
        assert type(await caller.ended()) is expected
        assert not running.rank.submitted
    assert ended(expected.reason) == before + 1


@pytest.mark.parametrize(
    ("fields", "expected", "field"),
    [
        ({"token_ids": [], "ticket": make_ticket(1)}, InvalidRequest, "token_ids"),
        ({"token_ids": [100]}, InvalidRequest, "token_ids"),
        ({"token_ids": [1] * 1000}, ContextExceeded, "max_tokens"),
        ({"token_ids": [1] * 64, "held_blocks": 1}, InvalidRequest, "held_blocks"),
        ({"token_ids": [1] * 64, "held_blocks": 2**32 - 1, "ticket": make_ticket(64)}, InvalidRequest, "held_blocks"),
        ({"sampling": common_pb2.SamplingParams(temperature=-1)}, InvalidRequest, "temperature"),
        ({"cache_salt": b"s" * 300}, InvalidRequest, "cache_salt"),
    ],
)
async def test_a_prompt_that_cannot_run_names_its_field(
    fields: dict[str, Any], expected: type[MeshError], field: str
) -> None:
    async with prefill_without_rank() as running, prefill_caller(running.endpoint) as caller:
        caller.start(prefill_request(**{"token_ids": PROMPT, **fields}))
        error = await caller.ended()
        assert type(error) is expected
        assert error.metadata["field"] == field
        assert not running.rank.submitted


async def test_a_landing_begins_after_the_blocks_that_the_receiver_holds() -> None:
    async with prefill_without_rank() as running, prefill_caller(running.endpoint) as caller:
        key = await accepted(running, caller, held_blocks=2)
        push = running.rank.submitted[key].push
        assert push is not None
        assert (push.held_blocks, len(push.ticket.segments)) == (2, 1)


async def test_a_ticket_in_use_is_refused() -> None:
    async with (
        prefill_without_rank() as running,
        prefill_caller(running.endpoint) as first,
        prefill_caller(running.endpoint) as second,
    ):
        key = await accepted(running, first)
        second.start(prefill_request(PROMPT))
        assert isinstance(await second.ended(), InvalidRequest)
        first_token(running, key)
        running.rank.emit(PushEnded(TRANSFER, 512, "tcp"))
        assert await first.ended() is None


@pytest.mark.parametrize("stage", ["accepted", "first token"])
async def test_hanging_up_stops_the_rank_at_any_stage(stage: str) -> None:
    before = ended("cancelled")
    async with prefill_without_rank() as running, prefill_caller(running.endpoint) as caller:
        key = await accepted(running, caller)
        if stage != "accepted":
            first_token(running, key)
            await caller.next()
        caller.hang_up()
        await eventually(lambda: running.rank.cancelled == [key])
        # What the rank still says is of no interest.
        running.rank.emit(PushEnded(TRANSFER, 0, "tcp", "cancelled"))
        first_token(running, key)
    assert ended("cancelled") == before + 1


@pytest.mark.parametrize("error", [InvalidRequest, ContextExceeded, NamespaceMismatch, WorkerFull])
async def test_a_refusal_of_the_rank_ends_the_call(error: type[MeshError]) -> None:
    async with prefill_without_rank() as running, prefill_caller(running.endpoint) as caller:
        key = await accepted(running, caller)
        refused = Output(key, len(PROMPT), [], refusal=Refusal(error.reason, "no"))
        running.rank.emit(running.rank.step(refused))
        assert type(await caller.ended()) is error


async def test_an_unknown_refusal_is_not_the_callers_mistake() -> None:
    async with prefill_without_rank() as running, prefill_caller(running.endpoint) as caller:
        key = await accepted(running, caller)
        refused = Output(key, len(PROMPT), [], refusal=Refusal("SOMETHING_NEW", "no"))
        running.rank.emit(running.rank.step(refused))
        error = await caller.ended()
        assert error is not None
        assert (error.code.name, error.reason, error.message) == ("INTERNAL", "SOMETHING_NEW", "no")


@pytest.mark.parametrize("computed", [False, True])
async def test_a_push_that_fails_has_the_prompt_placed_again(computed: bool) -> None:
    async with prefill_without_rank() as running, prefill_caller(running.endpoint) as caller:
        key = await accepted(running, caller)
        if computed:
            first_token(running, key)
        running.rank.emit(PushEnded(TRANSFER, 0, "tcp", "the receiver was lost"))
        error = await caller.ended()
        assert isinstance(error, PushFailed)
        assert "the receiver was lost" in error.message


async def test_a_landing_whose_deadline_passed_ends_its_call() -> None:
    async with prefill_without_rank() as running, prefill_caller(running.endpoint) as caller:
        key = await accepted(running, caller)
        running.clock.now += 20
        assert isinstance(await caller.ended(), DeadlineExceeded)
        assert running.rank.cancelled == [key]


async def test_the_death_of_the_rank_ends_every_call() -> None:
    async with (
        prefill_without_rank() as running,
        prefill_caller(running.endpoint) as first,
        prefill_caller(running.endpoint) as second,
    ):
        await accepted(running, first)
        await accepted(running, second, ticket=make_ticket(150, name=2))
        running.rank.die()
        for caller in (first, second):
            assert isinstance(await caller.ended(), EngineFailed)
        async with prefill_caller(running.endpoint) as late:
            late.start(prefill_request(PROMPT))
            assert isinstance(await late.ended(), WorkerDraining)


async def test_a_full_queue_sends_prompts_elsewhere() -> None:
    small = msgspec.structs.replace(TRANSFER_READY, max_requests=1)
    async with (
        prefill_without_rank(small, queue={"waiting_prompts": 1}) as running,
        prefill_caller(running.endpoint) as first,
        prefill_caller(running.endpoint) as second,
        prefill_caller(running.endpoint) as third,
    ):
        await accepted(running, first)
        await accepted(running, second, ticket=make_ticket(150, name=2))
        third.start(prefill_request(PROMPT, make_ticket(150, name=3)))
        assert isinstance(await third.ended(), WorkerFull)


async def test_a_prompt_over_the_queued_tokens_goes_elsewhere() -> None:
    async with (
        prefill_without_rank(queue={"queued_tokens": 200}) as running,
        prefill_caller(running.endpoint) as first,
        prefill_caller(running.endpoint) as second,
        prefill_caller(running.endpoint) as third,
    ):
        key = await accepted(running, first)
        second.start(prefill_request(PROMPT, make_ticket(150, name=2)))
        assert isinstance(await second.ended(), WorkerFull)
        first_token(running, key)
        await first.next()
        await accepted(running, third, ticket=make_ticket(150, name=3))


async def test_a_draining_worker_only_finishes_its_prompts() -> None:
    async with (
        prefill_without_rank() as running,
        prefill_caller(running.endpoint) as early,
        prefill_caller(running.endpoint) as late,
    ):
        key = await accepted(running, early)
        draining = asyncio.create_task(running.worker.drain(60))
        await asyncio.sleep(0.02)
        late.start(prefill_request(PROMPT, make_ticket(150, name=2)))
        assert isinstance(await late.ended(), WorkerDraining)
        assert running.worker.host.report.next_report(snapshot=True).state is WorkerState.DRAINING
        assert not draining.done()
        first_token(running, key)
        running.rank.emit(PushEnded(TRANSFER, 512, "tcp"))
        assert await early.ended() is None
        await asyncio.wait_for(draining, 20)


async def test_a_prompt_longer_than_the_drain_is_sent_elsewhere() -> None:
    async with prefill_without_rank() as running, prefill_caller(running.endpoint) as caller:
        await accepted(running, caller)
        await running.worker.drain(0.01)
        assert isinstance(await caller.ended(), WorkerDraining)


async def test_a_prefill_worker_has_an_identity_to_report() -> None:
    async with prefill_without_rank() as running:
        identity = running.worker.host.identity
        assert (identity.worker_id, identity.role, identity.endpoint) == (
            "prefill-1",
            WorkerRole.PREFILL,
            running.endpoint,
        )
        assert identity.block_bytes == TRANSFER_READY.block_bytes


async def test_garbage_on_the_wire_ends_its_call_alone() -> None:
    async with (
        prefill_without_rank() as running,
        Channels().open(running.endpoint) as channel,
        prefill_caller(running.endpoint) as caller,
    ):
        garbage = PrefillCaller(channel)
        method: Any = channel.unary_stream(f"/{SERVICE}/Prefill")
        garbage.call = method(b"\xff\xff\xff\xff not a message")
        assert isinstance(await garbage.ended(), InvalidRequest)
        await accepted(running, caller)


async def test_a_worker_that_loads_its_model_asks_for_patience() -> None:
    async with serving(prefill_config()) as (_, server), Channels().open(server.endpoint) as channel:
        caller = PrefillCaller(channel)
        caller.start(prefill_request(PROMPT))
        error = await caller.ended()
        assert error is not None
        assert error.reason == "NO_WORKER"
