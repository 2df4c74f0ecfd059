"""Every service of a mesh behind a listener of one Envoy, as behind the proxies of a service mesh."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import yaml

from cli.launcher.composition import HOST, MODULES, WORKER_MODULES, ServiceSpec
from mesh.ports import free_port

ENVOY = Path(sys.executable).with_name("envoy")
_EXTENSIONS = "type.googleapis.com/envoy.extensions"


@dataclass
class Sidecars:
    """Starts its Envoy when a mesh is deployed."""

    directory: Path
    admin_port: int = field(default_factory=free_port)
    _envoy: subprocess.Popen[bytes] | None = None

    def deployed(self, specs: Sequence[ServiceSpec]) -> list[ServiceSpec]:
        """The processes of a plan, who call each other through Envoy. Clients call gateways directly."""
        # Workers have no port of their own in a plan.
        specs = [spec if spec.port else replace(spec, port=free_port()) for spec in specs]
        listeners = {spec.port: free_port() for spec in specs if spec.port and spec.module != MODULES["gateway"]}
        path = self.directory / "sidecars.yaml"
        path.write_text(yaml.safe_dump(_bootstrap(listeners, self.admin_port)))
        with (self.directory / "envoy.log").open("wb") as log:
            command = [str(ENVOY), "-c", str(path), "--concurrency", "1", "-l", "warn"]
            self._envoy = subprocess.Popen(command, stdout=log, stderr=log)
        return [_behind(spec, listeners) for spec in specs]

    async def calls(self) -> dict[str, int]:
        """How many went through Envoy, by the port of the service."""
        async with httpx.AsyncClient(trust_env=False) as client:
            url = f"http://{HOST}:{self.admin_port}/stats?format=json&filter=^cluster\\..*\\.upstream_rq_total$"
            stats = (await client.get(url)).json()["stats"]
        return {each["name"].split(".")[1]: each["value"] for each in stats}

    def stop(self) -> None:
        if self._envoy is not None:
            self._envoy.kill()
            self._envoy.wait()


@contextmanager
def sidecars(directory: Path) -> Iterator[Sidecars]:
    running = Sidecars(directory)
    try:
        yield running
    finally:
        running.stop()


def _behind(spec: ServiceSpec, listeners: dict[int, int]) -> ServiceSpec:
    settings = list(spec.settings)
    for port, listener in listeners.items():
        settings = [setting.replace(f"{HOST}:{port}", f"{HOST}:{listener}") for setting in settings]
    if spec.module in WORKER_MODULES and spec.port:
        settings.append(f"server.advertise={HOST}:{listeners[spec.port]}")
    return replace(spec, settings=tuple(settings))


def _bootstrap(listeners: dict[int, int], admin_port: int) -> dict[str, Any]:
    return {
        "admin": {"address": _address(admin_port)},
        "static_resources": {
            "listeners": [_listener(listener, str(port)) for port, listener in listeners.items()],
            "clusters": [_cluster(port) for port in listeners],
        },
    }


def _listener(port: int, cluster: str) -> dict[str, Any]:
    manager = {
        "@type": f"{_EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": cluster,
        "codec_type": "HTTP2",
        "stream_idle_timeout": "0s",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": cluster,
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": cluster, "timeout": "0s"}}],
                }
            ]
        },
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": f"{_EXTENSIONS}.filters.http.router.v3.Router"},
            }
        ],
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    return {"name": cluster, "address": _address(port), "filter_chains": [{"filters": filters}]}


def _cluster(port: int) -> dict[str, Any]:
    options = {
        "@type": f"{_EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    return {
        "name": str(port),
        "connect_timeout": "1s",
        "load_assignment": {
            "cluster_name": str(port),
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(port)}}]}],
        },
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options},
    }


def _address(port: int) -> dict[str, Any]:
    return {"socket_address": {"address": HOST, "port_value": port}}
