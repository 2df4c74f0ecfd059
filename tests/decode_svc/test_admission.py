from typing import Any

import msgspec
import pytest

from decode_svc.admission import admit, check
from decode_svc.config import DecodeQueueConfig
from decode_svc.sessions import RequestBacklog
from mesh.domain.sampling import Sampling
from mesh.domain.targets import WorkerTarget
from mesh.errors import ContextExceeded, InvalidRequest, PlaceAgain, WorkerFull
from tests.support.decoding import PREFILL, READY, make_submission

QUEUE = DecodeQueueConfig(waiting_requests=2, queued_prefill_tokens=100, kept_tokens=1000)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"token_ids": [0, 99]},
        {"token_ids": [1] * 990, "max_tokens": 10},
        {"sampling": Sampling(temperature=2.0, top_p=0.1, top_k=5, top_logprobs=20)},
        {"stop_token_ids": [0, 99]},
    ],
)
def test_a_request_that_can_run_here_passes(changes: dict[str, Any]) -> None:
    check(make_submission(**changes), READY, can_prefill=True)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, 100]}, "token_ids"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_token_ids": [100]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 2000}, "stop_token_ids"),
        ({"cache_salt": b"s" * 300}, "cache_salt"),
        ({"prefill": PREFILL}, "prefill"),
        ({"sampling": Sampling(temperature=-0.1)}, "temperature"),
        ({"sampling": Sampling(temperature=float("nan"))}, "temperature"),
        ({"sampling": Sampling(temperature=float("inf"))}, "temperature"),
        ({"sampling": Sampling(top_p=0.0)}, "top_p"),
        ({"sampling": Sampling(top_p=1.1)}, "top_p"),
        ({"sampling": Sampling(top_p=float("nan"))}, "top_p"),
        ({"sampling": Sampling(top_logprobs=21)}, "top_logprobs"),
    ],
)
def test_a_request_that_cannot_run_names_its_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check(make_submission(**changes), READY, can_prefill=True)
    assert caught.value.metadata["field"] == field


def test_a_request_over_the_context_says_the_room() -> None:
    with pytest.raises(ContextExceeded, match=r"990 prompt tokens and max_tokens 11 make 1001.* room for 1000"):
        check(make_submission(token_ids=[1] * 990, max_tokens=11), READY, can_prefill=True)


def test_a_request_over_the_pool_is_over_the_context() -> None:
    small = msgspec.structs.replace(READY, total_blocks=2)
    with pytest.raises(ContextExceeded, match="room for 128"):
        check(make_submission(token_ids=[1] * 120, max_tokens=9), small, can_prefill=True)


def backlog(**changes: Any) -> RequestBacklog:
    return RequestBacklog(**{"live_requests": 0, "queued_prefill_tokens": 0, "kept_tokens": 0, **changes})


@pytest.mark.parametrize(
    ("held", "refused"),
    [
        ({"live_requests": 5}, False),
        ({"live_requests": 6}, True),
        ({"queued_prefill_tokens": 97}, False),
        ({"queued_prefill_tokens": 98}, True),
        ({"live_requests": 60, "ahead": 0.01}, False),
        ({"queued_prefill_tokens": 10_000, "ahead": 0.009}, False),
        ({"kept_tokens": 1000}, False),
        ({"kept_tokens": 1001}, True),
    ],
)
def test_a_request_is_placed_elsewhere_beyond_each_limit(held: dict[str, float], refused: bool) -> None:
    if not refused:
        admit(make_submission(), backlog(**held), 4, QUEUE)
        return
    with pytest.raises(WorkerFull):
        admit(make_submission(), backlog(**held), 4, QUEUE)


def test_an_idle_worker_takes_prompts_longer_than_its_queue() -> None:
    admit(make_submission(token_ids=[1] * 500), backlog(), 4, QUEUE)


def test_a_worker_without_prefill_takes_prompts_computed_elsewhere() -> None:
    ready = msgspec.structs.replace(READY, transfer_address=b"address")
    check(make_submission(prefill=PREFILL), ready, can_prefill=False)
    with pytest.raises(PlaceAgain):
        check(make_submission(), ready, can_prefill=False)
    with pytest.raises(InvalidRequest, match="endpoint"):
        check(make_submission(prefill=WorkerTarget("prefill-1", "first", "")), ready, can_prefill=True)


def test_a_prefill_worker_can_push_at_least_one_block() -> None:
    ready = msgspec.structs.replace(READY, transfer_address=b"address")
    piece_bytes = ready.block_bytes // ready.namespace.layers
    enough = make_submission(prefill=WorkerTarget("prefill-1", "first", "p:1", slot_bytes=piece_bytes))
    check(enough, ready, can_prefill=False)
    too_small = make_submission(prefill=WorkerTarget("prefill-1", "first", "p:1", slot_bytes=piece_bytes - 1))
    with pytest.raises(InvalidRequest, match=f"slots of {piece_bytes - 1} bytes .* raise its transfer.slot_bytes"):
        check(too_small, ready, can_prefill=False)


def test_a_prompt_computed_elsewhere_waits_in_no_queue() -> None:
    admit(make_submission(prefill=PREFILL), backlog(queued_prefill_tokens=100), 4, QUEUE)
