"""A prefill worker that refuses a prompt: its request ends or moves at once, and waits for no deadline."""

import pytest

from mesh.errors import ContextExceeded, InvalidConstraint, InvalidRequest, MeshError, PrefillLost
from tests.support.decode_server import decode_without_rank, gateway_client
from tests.support.fake_prefill import fake_prefill
from tests.support.prefill_calls import called, rank_of


@pytest.mark.parametrize(
    ("refused", "ended"),
    [(InvalidConstraint, InvalidConstraint), (InvalidRequest, PrefillLost), (ContextExceeded, PrefillLost)],
)
async def test_a_refused_prompt_ends_with_its_error_or_moves(refused: type[MeshError], ended: type[MeshError]) -> None:
    """https://github.com/vllm-project/aibrix/issues/2289: a failed prefill is swallowed, decode waits out its timeout.

    https://github.com/sgl-project/sglang/issues/30233: decode went on with the KV of a prompt that prefill refused.
    """
    async with decode_without_rank() as running, fake_prefill() as prefill, gateway_client(running.endpoint) as gateway:
        call = await called(running, gateway, prefill)
        call.end(refused("not here"))
        await gateway.ended(1)
        error = gateway.requests[1].error
        assert isinstance(error, ended) and "not here" in error.message
        assert rank_of(running).cancelled == [0]
        assert not rank_of(running).first_tokens
