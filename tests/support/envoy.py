"""A real Envoy with the configuration that deploy/envoy writes, in front of gateways."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from deploy.envoy.bootstrap import Gateway, Listeners, bootstrap
from launcher.process import Child
from mesh.ports import free_port
from tests.support.waiting import eventually

ENVOY = Path(sys.executable).with_name("envoy")
HOST = "127.0.0.1"


@dataclass(frozen=True)
class Envoy:
    """A running Envoy and what it knows of the gateways behind it, by their gRPC port or, in the cluster "http", by
    their HTTP port.
    """

    listeners: Listeners

    async def hosts(self, cluster: str = "grpc") -> dict[int, dict[str, Any]]:
        async with httpx.AsyncClient(trust_env=False) as client:
            url = f"http://{HOST}:{self.listeners.admin_port}/clusters?format=json"
            clusters = (await client.get(url)).json()["cluster_statuses"]
        (found,) = [each for each in clusters if each["name"] == cluster]
        return {each["address"]["socket_address"]["port_value"]: each for each in found["host_statuses"]}

    async def healthy(self, cluster: str = "grpc") -> set[int]:
        known = await self.hosts(cluster)
        return {port for port, host in known.items() if host["health_status"] == {"eds_health_status": "HEALTHY"}}

    async def until_healthy(self, ports: set[int], cluster: str = "grpc") -> None:
        async def all_are() -> bool:
            return await self.healthy(cluster) == ports

        await eventually(all_are)

    async def count(self, statistic: str, cluster: str = "grpc") -> dict[int, int]:
        """One statistic of each gateway, by port."""
        return {
            port: next(
                (int(each["value"]) for each in host["stats"] if each["name"] == statistic and "value" in each), 0
            )
            for port, host in (await self.hosts(cluster)).items()
        }


@asynccontextmanager
async def running_envoy(gateways: Sequence[Gateway], directory: Path) -> AsyncIterator[Envoy]:
    """Run an Envoy with its files in `directory`. It has found every gateway healthy when the block begins."""
    listeners = Listeners(HOST, free_port(), free_port(), free_port())
    path = directory / "envoy.yaml"
    path.write_text(yaml.safe_dump(bootstrap(gateways, listeners)))
    # Two Envoys with the same base id would share memory.
    options = ("--concurrency", "1", "-l", "warn", "--use-dynamic-base-id")
    child = Child("envoy", [str(ENVOY), "-c", str(path), *options], lambda *_: None)
    await child.start()
    try:
        await eventually(lambda: is_listening(listeners.admin_port))
        envoy = Envoy(listeners)
        await envoy.until_healthy({each.grpc_port for each in gateways})
        await envoy.until_healthy({each.http_port for each in gateways}, "http")
        yield envoy
    finally:
        await child.stop(5)


async def is_listening(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(HOST, port)
    except OSError:
        return False
    writer.close()
    return True
