"""`deepmesh role`: has a running worker take another role."""

import asyncio
import time
from contextlib import suppress
from enum import StrEnum
from typing import Annotated

import typer
from deepmesh.internal.v1 import scheduler_pb2, worker_pb2, worker_pb2_grpc, workers_pb2

from cli.endpoints import SCHEDULER, AutoscalersCertificates, SchedulerOption, certified_channels
from cli.status import read_workers
from mesh.domain import worker_wire
from mesh.domain.workers import WorkerRole
from mesh.errors import EndpointUnavailable, InvalidRequest, NoWorker
from mesh.rpc.channel import Channels
from mesh.rpc.identity import Role

# The worker checks its configuration for the role before it answers.
ANSWER_SECONDS = 60.0
LOOK_SECONDS = 0.2
WAIT_SECONDS = 60.0
# As WAIT_SECONDS, if the worker loads its weights again.
RELOAD_SECONDS = 1800.0


class RoleName(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


def role(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Its id, as deepmesh status shows it.")],
    wanted: Annotated[RoleName, typer.Argument(metavar="ROLE", help="prefill or decode.")],
    scheduler: SchedulerOption = SCHEDULER,
    certificates: AutoscalersCertificates = None,
    drain: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds in which its requests may end before they are placed on other workers."),
    ] = None,
    reload: Annotated[
        bool,
        typer.Option(
            "--reload", help="Let it load its weights again if the role needs others, or other shares of them."
        ),
    ] = False,
    wait: Annotated[
        float | None,
        typer.Option(
            min=1,
            help="Seconds to wait for its return, beyond those.",
            show_default=f"{WAIT_SECONDS:g}, or {RELOAD_SECONDS:g} while it loads",
        ),
    ] = None,
) -> None:
    """Have a running worker take another role, with the weights that it has loaded, and wait until it serves.

    The worker drains first. The role lasts as long as the worker's process: after a restart, the worker has its
    configured role again. If services have certificates, this needs an autoscaler's certificate.
    """
    channels, wanted_role = certified_channels(certificates), WorkerRole(wanted.value)
    typer.echo(asyncio.run(change_role(channels, scheduler, worker, wanted_role, drain, wait, reload)))


async def change_role(
    channels: Channels,
    scheduler: str,
    worker_id: str,
    role: WorkerRole,
    drain: float | None = None,
    wait: float | None = None,
    may_reload: bool = False,
) -> str:
    """Have the worker take the role, and return in words how that went, once it serves; see `role`.

    Raises NoWorker, EndpointUnavailable, InvalidRequest if no worker would be left to answer, or the worker's own
    error.
    """
    began = time.monotonic()
    before = await _find(scheduler, channels, worker_id)
    if before is None:
        raise NoWorker(f"the scheduler at {scheduler} knows no worker {worker_id}: deepmesh status lists them")
    if _role_of(before) is role:
        return f"{worker_id} is a {role.value} worker already"
    if role is WorkerRole.PREFILL and not await _others_decode(scheduler, channels, before.identity):
        model = before.identity.model
        raise InvalidRequest(f"{worker_id} is the last decode worker of {model}: have another take that role first")
    reloads = await _ask(channels, before.identity, role, drain, may_reload)
    patience = (wait or (RELOAD_SECONDS if reloads else WAIT_SECONDS)) + (drain or 0.0)
    try:
        async with asyncio.timeout(patience):
            after = await _until_back(scheduler, channels, before.identity)
    except TimeoutError:
        raise EndpointUnavailable(f"{worker_id} is not back after {patience:g} s: see its log") from None
    if _role_of(after) is not role:
        raise EndpointUnavailable(f"{worker_id} was started again as a {_role_of(after).value} worker: see its log")
    included = "its drain and the loading of its weights" if reloads else "its drain"
    return f"{worker_id} is a {role.value} worker after {time.monotonic() - began:.1f} s, {included} included"


async def _ask(
    channels: Channels, identity: workers_pb2.WorkerIdentity, role: WorkerRole, drain: float | None, may_reload: bool
) -> bool:
    """Ask the worker to change. Returns whether it loads its weights again."""
    request = worker_pb2.ChangeRoleRequest(
        worker_id=identity.worker_id, role=worker_wire.role_name(role), may_reload=may_reload
    )
    if drain is not None:
        request.drain.FromNanoseconds(int(drain * 1e9))
    own = Role(worker_wire.role(identity.role, "role").value)
    async with channels.open(identity.endpoint, own) as channel:
        answer = await worker_pb2_grpc.WorkerServiceStub(channel).ChangeRole(request, timeout=ANSWER_SECONDS)
    return bool(answer.reloads)


async def _until_back(
    scheduler: str, channels: Channels, before: workers_pb2.WorkerIdentity
) -> scheduler_pb2.WorkerStatus:
    while True:
        # The scheduler may be away for a while too.
        with suppress(EndpointUnavailable):
            found = await _find(scheduler, channels, before.worker_id)
            if found is not None and found.identity.incarnation != before.incarnation:
                return found
        await asyncio.sleep(LOOK_SECONDS)


async def _find(scheduler: str, channels: Channels, worker_id: str) -> scheduler_pb2.WorkerStatus | None:
    workers = (await read_workers(scheduler, channels)).workers
    return next((worker for worker in workers if worker.identity.worker_id == worker_id), None)


async def _others_decode(scheduler: str, channels: Channels, identity: workers_pb2.WorkerIdentity) -> bool:
    workers = (await read_workers(scheduler, channels)).workers
    return any(
        other.identity.worker_id != identity.worker_id
        and other.identity.model == identity.model
        and other.state != workers_pb2.WORKER_STATE_DRAINING
        and _role_of(other) is WorkerRole.DECODE
        for other in workers
    )


def _role_of(worker: scheduler_pb2.WorkerStatus) -> WorkerRole:
    return worker_wire.role(worker.identity.role, "role")
