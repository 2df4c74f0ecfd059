"""Whether a prompt's attention is sparse: the client's choice, the workers' settings, and what goes out to them."""

from typing import Any

import grpc
import pytest
from deepmesh.internal.v1 import sparse_prefill_pb2

from mesh.blocks import chain_hashes
from mesh.domain.sparse_prefill import SparsePrefill
from mesh.errors import InvalidRequest
from mesh.rpc.failures import from_rpc_error
from tests.support.fake_decode import FakeDecodeWorker
from tests.support.gateways import MODEL, Mesh, collect, ids_request, prefill_identity, running_mesh
from tests.support.waiting import eventually

OFFERED = SparsePrefill(128, 0.875)
MESSAGE = sparse_prefill_pb2.SparsePrefill(from_tokens=128, recall=0.875)
LONG, SHORT = list(range(200)), list(range(128))


def offering() -> FakeDecodeWorker:
    return FakeDecodeWorker(sparse_prefill=MESSAGE)


async def submitted(mesh: Mesh, prompt: list[int], **fields: Any) -> sparse_prefill_pb2.SparsePrefill | None:
    """What the worker is told; the scheduler is told the same, and asked about the blocks of the same chain."""
    await collect(mesh, ids_request(prompt, max_tokens=1, **fields))
    message = mesh.worker.submissions[-1]
    told = message.sparse_prefill if message.HasField("sparse_prefill") else None
    sparse = None if told is None else OFFERED
    salt = message.cache_salt
    assert list(mesh.scheduler.queries[-1].block_hashes) == chain_hashes(prompt, salt, sparse)
    query = mesh.scheduler.queries[-1]
    assert (query.sparse_prefill if query.HasField("sparse_prefill") else None) == told
    return told


async def test_a_long_prompt_is_sparse_unless_its_client_declines() -> None:
    async with running_mesh(offering()) as mesh:
        assert await submitted(mesh, LONG) == MESSAGE
        assert await submitted(mesh, LONG, sparse_prefill=True) == MESSAGE
        assert await submitted(mesh, LONG, sparse_prefill=False) is None
        assert await submitted(mesh, SHORT, sparse_prefill=True) is None


async def test_it_is_refused_where_a_worker_does_not_offer_it() -> None:
    async with running_mesh(offering()) as mesh:
        # A prefill worker that computes prompts exactly joins.
        mesh.scheduler.add(prefill_identity())
        await eventually(lambda: mesh.gateway.catalog.sparse_prefill(MODEL) is None)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(mesh, ids_request(LONG, sparse_prefill=True))
        error = from_rpc_error(caught.value)
        assert isinstance(error, InvalidRequest) and error.metadata["field"] == "sparse_prefill"
        assert "engine.sparse_prefill.recall" in str(error)
        assert await submitted(mesh, LONG) is None


async def test_every_http_api_takes_it() -> None:
    messages = [{"role": "user", "content": "hi " * 200}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": LONG, "max_tokens": 1},
        "/v1/chat/completions": {"messages": messages, "max_tokens": 1},
        "/v1/responses": {"input": messages, "max_output_tokens": 1},
        "/v1/messages": {"messages": messages, "max_tokens": 1},
    }
    async with running_mesh(offering()) as mesh:
        for path, body in bodies.items():
            for choice, told in (({}, True), ({"sparse_prefill": False}, False)):
                response = await mesh.http.post(path, json={"model": MODEL, **body, **choice})
                assert response.status_code == 200, response.text
                assert mesh.worker.submissions[-1].HasField("sparse_prefill") == told
