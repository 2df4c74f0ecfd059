"""A decode worker's calls to prefill workers, made and answered by tests."""

from typing import Any

from deepmesh.internal.v1 import targets_pb2

from mesh.errors import PrefillLost
from mesh.observe.metrics import DECODE_PREFILLS
from tests.support.decode_server import GatewayClient, RunningWorker
from tests.support.fake_prefill import FakePrefill, FakePrefillCall
from tests.support.fake_rank import FakeRankClient
from tests.support.metric_values import value_of
from tests.support.prefilling import make_ticket
from tests.support.waiting import eventually
from transfer.ticket import Ticket

PROMPT = [number % 100 for number in range(150)]


def ended(outcome: str) -> float:
    return value_of(DECODE_PREFILLS.labels(outcome))


def target(prefill: FakePrefill) -> targets_pb2.WorkerTarget:
    return targets_pb2.WorkerTarget(worker_id="prefill-1", incarnation="first", endpoint=prefill.endpoint)


def rank_of(running: RunningWorker) -> FakeRankClient:
    assert running.rank is not None
    return running.rank


async def submitted(running: RunningWorker, gateway: GatewayClient, prefill: FakePrefill, **fields: Any) -> int:
    """Submit PROMPT, to be computed by `prefill`; returns the rank's key."""
    key = len(rank_of(running).submitted)
    await gateway.submit(PROMPT, 10, prefill=target(prefill), **fields)
    await eventually(lambda: key in rank_of(running).submitted)
    return key


async def called(
    running: RunningWorker, gateway: GatewayClient, prefill: FakePrefill, landing: Ticket | None = None, **fields: Any
) -> FakePrefillCall:
    """Submit PROMPT and open its landing, so that the decode worker calls the prefill worker; returns that call."""
    number = len(prefill.calls)
    key = await submitted(running, gateway, prefill, **fields)
    rank_of(running).open_landing(key, landing or make_ticket(len(PROMPT), name=number + 1))
    return await prefill.call(number)


def lost(gateway: GatewayClient, stream_id: int = 1) -> PrefillLost:
    error = gateway.requests[stream_id].error
    assert isinstance(error, PrefillLost)
    assert (error.code.name, error.metadata) == ("ABORTED", {"worker_id": "prefill-1"})
    return error
