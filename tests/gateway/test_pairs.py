"""Requests whose prompt is computed by a prefill worker, and what becomes of them when that one fails."""

from deepmesh.internal.v1 import scheduler_pb2, targets_pb2

from mesh.errors import MeshError, NamespaceMismatch, PrefillLost, WorkerFull
from tests.support.fake_decode import FakeDecodeWorker, oracle_tokens
from tests.support.gateways import Mesh, collect, ids_request, prefill_identity, running_mesh
from tests.support.waiting import eventually

PROMPT = [5, 6, 7]


async def answered(mesh: Mesh) -> None:
    assert (await collect(mesh, ids_request(PROMPT))).token_ids == oracle_tokens(PROMPT, 8)


def avoided(mesh: Mesh) -> list[list[str]]:
    return [list(query.avoid_worker_ids) for query in mesh.scheduler.queries]


def prefills(mesh: Mesh) -> list[str]:
    return [submission.prefill.worker_id for submission in mesh.worker.submissions]


async def test_the_decode_worker_is_told_prefill_worker_and_store() -> None:
    async with running_mesh() as mesh:
        mesh.scheduler.add(prefill_identity())
        mesh.scheduler.store = targets_pb2.StoreTarget(store_id="store-0", blocks=4)
        await answered(mesh)
        submission = mesh.worker.submissions[0]
        assert submission.prefill == targets_pb2.WorkerTarget(
            worker_id="prefill-0", incarnation="first", endpoint="127.0.0.1:1", slot_bytes=65536, draft_layers=0
        )
        assert submission.store == mesh.scheduler.store


async def test_both_workers_are_told_their_booked_ranks() -> None:
    async with running_mesh() as mesh:
        await answered(mesh)
        mesh.scheduler.add(prefill_identity())
        mesh.scheduler.decode_rank, mesh.scheduler.prefill_rank = 0, 3
        await answered(mesh)
        ranks = [(each.HasField("rank"), each.rank, each.prefill_rank) for each in mesh.worker.submissions]
        assert ranks == [(False, 0, 0), (True, 0, 3)]


async def test_without_a_prefill_worker_and_a_store_none_is_named() -> None:
    async with running_mesh() as mesh:
        await answered(mesh)
        submission = mesh.worker.submissions[0]
        assert not submission.HasField("prefill")
        assert not submission.HasField("store")


async def moved(failure: MeshError, outcome: scheduler_pb2.PlacementOutcome) -> tuple[list[list[str]], list[str]]:
    """What was avoided, and who was to compute the prompt, when the first attempt ends with `failure`.

    The scheduler is told that it ended with `outcome`.
    """
    async with running_mesh(FakeDecodeWorker(refusals=[failure])) as mesh:
        for number in range(2):
            mesh.scheduler.add(prefill_identity(f"prefill-{number}"))
        await answered(mesh)
        await eventually(lambda: len(mesh.scheduler.outcomes) == 2)
        assert [told.outcome for told in mesh.scheduler.outcomes] == [outcome, scheduler_pb2.PLACEMENT_OUTCOME_FINISHED]
        return avoided(mesh), prefills(mesh)


async def test_only_the_lost_prefill_worker_is_avoided() -> None:
    lost = PrefillLost("prefill-0 died", metadata={"worker_id": "prefill-0"})
    assert await moved(lost, scheduler_pb2.PLACEMENT_OUTCOME_LOST) == ([[], ["prefill-0"]], ["prefill-0", "prefill-1"])


async def test_a_prefill_worker_of_another_namespace_is_avoided() -> None:
    mismatch = NamespaceMismatch("prefill-0 has other weights", metadata={"worker_id": "prefill-0"})
    assert await moved(mismatch, scheduler_pb2.PLACEMENT_OUTCOME_REFUSED) == (
        [[], ["prefill-0"]],
        ["prefill-0", "prefill-1"],
    )


async def test_a_decode_worker_without_room_is_avoided() -> None:
    full, other = FakeDecodeWorker(refusals=[WorkerFull("no room")]), FakeDecodeWorker(worker_id="decode-1")
    async with running_mesh(full, other) as mesh:
        mesh.scheduler.add(prefill_identity())
        await answered(mesh)
        assert avoided(mesh) == [[], ["decode-0"]]


async def test_without_a_scheduler_prefill_workers_are_still_chosen() -> None:
    async with running_mesh(FakeDecodeWorker(can_prefill=False)) as mesh:
        mesh.scheduler.add(prefill_identity())
        await eventually(lambda: len(mesh.gateway.directory.incarnations()) == 2)
        await mesh.scheduler_server.__aexit__(None, None, None)
        await answered(mesh)
        (submission,) = mesh.worker.submissions
        assert (submission.prefill.worker_id, submission.prefill.slot_bytes) == ("prefill-0", 65536)
