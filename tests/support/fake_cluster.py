"""A fake of the part of Kubernetes' API that a scheduler uses: pods' annotations, over TLS, for one account."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mesh.rpc.identity import Role
from scheduler.scaling.pod_costs import ANNOTATION
from scheduler.scaling.pods import Cluster
from tests.support.certificates import certified

HOST = "127.0.0.1"
NAMESPACE = "chat"


class FakeCluster:
    """`pods`: the annotations of each pod. Tests add and remove pods."""

    def __init__(self, *pods: str) -> None:
        self.pods: dict[str, dict[str, str]] = {name: {} for name in pods}
        self.token = "first"
        # Whether the account may patch pods.
        self.allowed = True
        # For each write that was carried out, the name of its pod.
        self.writes: list[str] = []
        # The paths of all requests, granted or not.
        self.paths: list[str] = []
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{{name}}"
        routes = [Route(path, self._patch, methods=["PATCH"]), Route("/{rest:path}", self._nothing, methods=["PATCH"])]
        self.app = Starlette(routes=routes)

    def first_to_go(self) -> str:
        """The pod that a ReplicaSet would end first."""
        return min(self.pods, key=lambda name: int(self.pods[name].get(ANNOTATION, "0")))

    async def _nothing(self, request: Request) -> Response:
        self.paths.append(request.url.path)
        return _status(404, "not found")

    async def _patch(self, request: Request) -> Response:
        self.paths.append(request.url.path)
        if request.headers["authorization"] != f"Bearer {self.token}":
            return _status(401, "Unauthorized")
        if not self.allowed:
            return _status(403, "pods is forbidden")
        if request.headers["content-type"] != "application/merge-patch+json":
            return _status(415, "the media type is not supported")
        annotations = self.pods.get(request.path_params["name"])
        if annotations is None:
            return _status(404, "pod not found")
        patch = await request.json()
        assert list(patch) == ["metadata"] and list(patch["metadata"]) == ["annotations"]
        # Kubernetes refuses values that are not 32-bit integers.
        assert -(2**31) <= int(patch["metadata"]["annotations"][ANNOTATION]) < 2**31
        annotations |= patch["metadata"]["annotations"]
        self.writes.append(request.path_params["name"])
        return JSONResponse({"kind": "Pod"})


def _status(code: int, message: str) -> Response:
    return JSONResponse({"kind": "Status", "message": message, "code": code}, code)


@asynccontextmanager
async def running_cluster(fake: FakeCluster, directory: Path) -> AsyncIterator[Cluster]:
    """Serve the cluster; gives its address with the files of the account that may use it."""
    tls = certified(directory, Role.OPERATOR, "kubernetes", hosts=[HOST])
    account = directory / "account"
    account.mkdir()
    (account / "ca.crt").write_bytes(tls.ca.read_bytes())
    (account / "namespace").write_text(NAMESPACE)
    (account / "token").write_text(fake.token)
    listener = socket.create_server((HOST, 0))
    options = uvicorn.Config(
        fake.app, log_level="error", lifespan="off", ssl_certfile=tls.certificate, ssl_keyfile=tls.key
    )
    server = uvicorn.Server(options)
    # Connections wait in the listener's queue until the server accepts.
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield Cluster(f"https://{HOST}:{listener.getsockname()[1]}", account)
    finally:
        server.should_exit = True
        await task
