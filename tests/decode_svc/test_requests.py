"""What a rank is told of a request whose prompt another worker computes."""

import pytest

from decode_svc.requests import submit_of
from decode_svc.wire import first_output
from engine.protocol.messages import Output
from mesh.domain.requests import Submission, TokenRequest
from mesh.domain.sampling import Sampling, StopConditions
from mesh.domain.targets import WorkerTarget
from prefill_svc.wire import response

REQUEST = TokenRequest("r", [1, 2, 3], Sampling(), StopConditions(5))


@pytest.mark.parametrize("draft_layers", [0, 2])
def test_the_rank_learns_of_the_prefill_workers_draft_layers(draft_layers: int) -> None:
    prefill = WorkerTarget("p", "first", "p:1", 1 << 20, draft_layers)
    submit = submit_of(Submission(1, REQUEST, None, prefill), 7)
    assert (submit.key, submit.sender_slot_bytes, submit.sender_draft_layers) == (7, 1 << 20, draft_layers)
    assert submit_of(Submission(1, REQUEST, None), 7).sender_draft_layers is None


@pytest.mark.parametrize("drafts_end", [None, 0, 3])
def test_the_resume_state_says_where_draft_layers_end(drafts_end: int | None) -> None:
    drawn = Output(0, 200, [11], cached_tokens=128, store_cached_tokens=64, host_cached_tokens=32)
    drawn.drafts_end = drafts_end
    sent = response(drawn).first_token.SerializeToString()
    received = type(response(drawn).first_token).FromString(sent)
    assert first_output(0, 200, received) == drawn
