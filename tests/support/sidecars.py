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

from cli.launcher.plan import HOST, MODULES, WORKER_MODULES, ServiceSpec
from mesh.ports import free_port
from tests.support.network import Network
from tests.support.separated_mesh import separated

ENVOY = Path(sys.executable).with_name("envoy")
# Its site in a network.
SITE = "proxy"
_EXTENSIONS = "type.googleapis.com/envoy.extensions"


@dataclass
class Sidecars:
    """Starts its Envoy when a mesh is deployed. With a `network`, it has the site "proxy", and each process its own."""

    directory: Path
    network: Network | None = None
    admin_port: int = field(default_factory=free_port)
    _envoy: subprocess.Popen[bytes] | None = None

    def deployed(self, specs: Sequence[ServiceSpec]) -> list[ServiceSpec]:
        """The processes of a plan, who call each other through Envoy. Clients call gateways directly."""
        # Workers have no port of their own in a plan.
        specs = [spec if spec.port else replace(spec, port=free_port()) for spec in specs]
        if self.network is not None:
            specs = separated(self.network, specs)
        listeners = [
            _Listener(spec.host, spec.port, self._host, free_port())
            for spec in specs
            if spec.port and spec.module != MODULES["gateway"]
        ]
        path = self.directory / "sidecars.yaml"
        path.write_text(yaml.safe_dump(_bootstrap(listeners, self._host, self.admin_port)))
        with (self.directory / "envoy.log").open("wb") as log:
            # Two of one number would share memory.
            command = [str(ENVOY), "-c", str(path), "--concurrency", "1", "-l", "warn", "--use-dynamic-base-id"]
            inside = [] if self.network is None else self.network.inside(SITE)
            self._envoy = subprocess.Popen([*inside, *command], stdout=log, stderr=log)
        return [_behind(spec, listeners) for spec in specs]

    async def calls(self) -> dict[str, int]:
        """How many went through Envoy, by the port of the service."""
        async with httpx.AsyncClient(trust_env=False) as client:
            url = f"http://{self._host}:{self.admin_port}/stats?format=json&filter=^cluster\\..*\\.upstream_rq_total$"
            stats = (await client.get(url)).json()["stats"]
        return {each["name"].split(".")[1]: each["value"] for each in stats}

    def stop(self) -> None:
        if self._envoy is not None:
            self._envoy.kill()
            self._envoy.wait()

    @property
    def _host(self) -> str:
        return HOST if self.network is None else self.network.address(SITE)


@dataclass(frozen=True)
class _Listener:
    """The address of a service, and that at which others reach it."""

    service_host: str
    service_port: int
    host: str
    port: int

    @property
    def cluster(self) -> str:
        return str(self.service_port)

    @property
    def service(self) -> str:
        return f"{self.service_host}:{self.service_port}"


@contextmanager
def sidecars(directory: Path, network: Network | None = None) -> Iterator[Sidecars]:
    running = Sidecars(directory, network)
    try:
        yield running
    finally:
        running.stop()


def _behind(spec: ServiceSpec, listeners: Sequence[_Listener]) -> ServiceSpec:
    settings = list(spec.settings)
    for each in listeners:
        settings = [setting.replace(each.service, f"{each.host}:{each.port}") for setting in settings]
        if spec.module in WORKER_MODULES and each.service == f"{spec.host}:{spec.port}":
            settings.append(f"server.advertise={each.host}:{each.port}")
    return replace(spec, settings=tuple(settings))


def _bootstrap(listeners: Sequence[_Listener], admin_host: str, admin_port: int) -> dict[str, Any]:
    return {
        "admin": {"address": _address(admin_host, admin_port)},
        "static_resources": {
            "listeners": [_listener(each) for each in listeners],
            "clusters": [_cluster(each) for each in listeners],
        },
    }


def _listener(listener: _Listener) -> dict[str, Any]:
    cluster = listener.cluster
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
    return {"name": cluster, "address": _address(listener.host, listener.port), "filter_chains": [{"filters": filters}]}


def _cluster(listener: _Listener) -> dict[str, Any]:
    options = {
        "@type": f"{_EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    return {
        "name": listener.cluster,
        "connect_timeout": "1s",
        "load_assignment": {
            "cluster_name": listener.cluster,
            "endpoints": [
                {"lb_endpoints": [{"endpoint": {"address": _address(listener.service_host, listener.service_port)}}]}
            ],
        },
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options},
    }


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
