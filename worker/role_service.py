"""WorkerService: requests that concern a worker itself."""

# grpc's classes are generic only in their stubs.
from __future__ import annotations

import json

import grpc
from deepmesh.internal.v1 import worker_pb2, worker_pb2_grpc

from mesh.domain import worker_wire
from mesh.errors import InvalidRequest, NoWorker
from mesh.rpc.identity import Role
from mesh.rpc.server import MeshServer, Registration
from worker.ranks.host import RankHost
from worker.role_change import RoleChange, ports_of

SERVICE = "deepmesh.internal.v1.WorkerService"
# Operators may look but not act.
SERVES = {"ChangeRole": (Role.AUTOSCALER,)}


class RoleServicer(worker_pb2_grpc.WorkerServiceServicer):
    """Serves nothing until `open`: the process is alive already while the model loads."""

    def __init__(self, change: RoleChange) -> None:
        self._change = change
        self._host: RankHost | None = None
        self._own: list[str] = []

    @property
    def registration(self) -> Registration:
        return Registration(worker_pb2_grpc.add_WorkerServiceServicer_to_server, self, SERVICE, serves=SERVES)

    def open(self, host: RankHost, server: MeshServer) -> None:
        self._host = host
        self._own = [*ports_of(server), f"worker_id={json.dumps(host.identity.worker_id)}"]

    async def ChangeRole(
        self,
        request: worker_pb2.ChangeRoleRequest,
        context: grpc.aio.ServicerContext[worker_pb2.ChangeRoleRequest, worker_pb2.ChangeRoleResponse],
    ) -> worker_pb2.ChangeRoleResponse:
        host = self._host
        if host is None:
            raise NoWorker("this worker is still loading its model: retry")
        if request.worker_id != host.identity.worker_id:
            raise InvalidRequest(
                f"this is worker {host.identity.worker_id!r}, and not {request.worker_id!r}", field="worker_id"
            )
        host.check_takes_new()
        drain_seconds = request.drain.ToNanoseconds() / 1e9 if request.HasField("drain") else None
        role = worker_wire.role(request.role, "role")
        await self._change.begin(role, drain_seconds, self._own, request.may_reload)
        return worker_pb2.ChangeRoleResponse(reloads=not self._change.keeps_ranks)
