from pathlib import Path

import pytest
from deepmesh.internal.v1 import worker_pb2, worker_pb2_grpc

from engine.config import EngineConfig
from engine.drafts.config import DraftsConfig
from engine.parallel.config import ParallelConfig
from engine.role_change import check_keeps_weights
from mesh.config_values import load
from mesh.domain import worker_wire
from mesh.domain.workers import WorkerRole
from mesh.errors import ConfigError, InvalidRequest
from mesh.rpc.channel import Channels
from prefill_svc.config import PrefillConfig
from tests.support.worker_process import WorkerProcess, worker_process
from worker.config import WorkerConfig
from worker.role_change import settings_of


async def ask(worker: WorkerProcess, role: WorkerRole, worker_id: str = "7", may_reload: bool = False) -> bool:
    """Returns whether it loads its weights again."""
    request = worker_pb2.ChangeRoleRequest(worker_id=worker_id, role=worker_wire.role_name(role), may_reload=may_reload)
    async with Channels().open(worker.endpoint) as channel:
        answer = await worker_pb2_grpc.WorkerServiceStub(channel).ChangeRole(request, timeout=60)
    return bool(answer.reloads)


def lines_with(worker: WorkerProcess, text: str) -> list[str]:
    return [line for line in worker.lines if text in line]


async def test_a_worker_takes_the_other_role_with_its_rank() -> None:
    # An id that looks like a number remains an id.
    settings = ('worker_id="7"', "engine.transfer={}", "engine.max_requests=8", "other_role=[engine.max_requests=4]")
    async with worker_process("decode_svc", *settings) as worker:
        await worker.child.wait_ready(worker.endpoint, Channels(), 60)
        rank = worker.rank
        with pytest.raises(InvalidRequest, match="this is worker '7', and not 'v'"):
            await ask(worker, WorkerRole.PREFILL, "v")
        await ask(worker, WorkerRole.DECODE)
        # It loads nothing that it need not load.
        assert not await ask(worker, WorkerRole.PREFILL, may_reload=True)
        await worker.said("role=prefill")
        await worker.child.wait_ready(worker.endpoint, Channels(), 60)
        assert worker.rank == rank
        first, second = lines_with(worker, "started, in seconds by phase")
        # The rank's process and what it has imported are kept.
        assert "process=" in first and "process=" not in second
        assert "freeing=" in second and "slots=" in second
        # It has the role now, and that is all right.
        await ask(worker, WorkerRole.PREFILL)
        await worker.ends_with_its_rank_when_killed()


async def test_a_worker_that_needs_other_weights_says_so() -> None:
    settings = ('worker_id="7"', "engine.transfer={}", "other_role=[engine.drafts.next_n=2]")
    async with worker_process("decode_svc", *settings) as worker:
        await worker.child.wait_ready(worker.endpoint, Channels(), 60)
        rank = worker.rank
        with pytest.raises(ConfigError, match=r"cannot change engine\.drafts from none to some: have it load them"):
            await ask(worker, WorkerRole.PREFILL)
        await worker.child.wait_ready(worker.endpoint, Channels(), 60)
        assert not lines_with(worker, "worker changes its role")
        assert await ask(worker, WorkerRole.PREFILL, may_reload=True)
        await worker.said("role=prefill")
        await worker.child.wait_ready(worker.endpoint, Channels(), 60)
        assert worker.rank != rank
        await worker.ends_with_its_rank_when_killed()


def test_settings_give_the_configuration_back_with_its_secrets() -> None:
    kept = {"scheduler": "127.0.0.1:1", "worker_id": "a b", "kv": {"secret": "a secret of all: {workers}"}}
    engine = {"backend": "oracle", "transfer": {"slot_bytes": 1 << 20}, "model_dir": "/a dir/'with' [signs]"}
    config = PrefillConfig.model_validate({**kept, "engine": engine, "queue": {"waiting_prompts": 3}})
    assert load(PrefillConfig, None, settings_of(config, PrefillConfig.model_fields)) == config
    shared = load(WorkerConfig, None, settings_of(config, WorkerConfig.model_fields))
    assert shared.engine == config.engine and shared.kv == config.kv


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_dir": Path("/b")}, r"engine\.model_dir from /a to /b"),
        ({"dtype": "bfloat16"}, r"engine\.dtype from auto to bfloat16"),
        ({"parallel": ParallelConfig(dp=2)}, r"engine\.parallel from \(tp 2, dp 1, ep 2\) to \(tp 1, dp 2, ep 2\)"),
        ({"drafts": {"next_n": 1}}, r"engine\.drafts from none to some"),
        ({"balance": {"redundant": 1}}, r"engine\.balance from \(0 copies"),
        (
            {"threads": 2, "random_weights": True},
            r"engine\.random_weights .*engine\.threads|engine\.threads .*random_w",
        ),
    ],
)
def test_what_needs_other_weights_is_named(changes: dict[str, object], named: str) -> None:
    config = EngineConfig(model_dir=Path("/a"), parallel=ParallelConfig(ranks=2, tp=2))
    with pytest.raises(ConfigError, match=named):
        check_keeps_weights(config, EngineConfig.model_validate({**config.model_dump(), **changes}))


def test_what_is_made_anew_may_differ() -> None:
    config = EngineConfig(model_dir=Path("/a"), parallel=ParallelConfig(ranks=2, tp=2), drafts=DraftsConfig(next_n=1))
    changes = {"max_requests": 7, "total_blocks": 9, "kv_dtype": "float8_e4m3fn", "transfer": {}, "overlap": "on"}
    changes |= {"mixed_step_ms": 40.0, "prompt_share": 0.3}
    changed = {"drafts": {"next_n": 3}, "parallel": {"tp": 2, "dp": 1, "prompt_wait_steps": 4}}
    check_keeps_weights(config, EngineConfig.model_validate({**config.model_dump(), **changes, **changed}))
