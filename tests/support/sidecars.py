"""Puts a listener of one Envoy in front of every service of a mesh, as a service mesh does with proxies.

A call passes Envoy once, in plaintext; or twice with mutual TLS in between, as from a caller's sidecar to a service's.
"""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import yaml

from launcher.plan import HOST, MODULES, WORKER_MODULES, ServiceSpec
from mesh.config import TlsConfig
from mesh.ports import free_port
from mesh.rpc.identity import Role
from mesh.tls import server_name
from tests.support.certificates import certified
from tests.support.envoy import ENVOY as ENVOY
from tests.support.network import Network
from tests.support.separated_mesh import separated

# Envoy's site in a network.
SITE = "proxy"
_EXTENSIONS = "type.googleapis.com/envoy.extensions"


@dataclass
class Sidecars:
    """Starts an Envoy when a mesh is deployed. With a `network` it is at the site "proxy", and each process at its
    own.
    """

    directory: Path
    network: Network | None = None
    # Whether there is mutual TLS between the caller's side and the service's.
    mutual: bool = False
    admin_port: int = field(default_factory=free_port)
    # Ports of the services' sides, by the service's role; empty without TLS.
    tls_ports: dict[Role, int] = field(default_factory=dict)
    _envoy: subprocess.Popen[bytes] | None = None

    def deployed(self, specs: Sequence[ServiceSpec]) -> list[ServiceSpec]:
        """The processes of a plan, changed to call each other through Envoy. Clients call gateways directly."""
        # A plan gives workers no port.
        specs = [spec if spec.port else replace(spec, port=free_port()) for spec in specs]
        if self.network is not None:
            specs = separated(self.network, specs)
        listeners = [
            _Listener(spec.host, spec.port, self._host, free_port(), self._encrypted(spec))
            for spec in specs
            if spec.port and spec.module != MODULES["gateway"]
        ]
        self.tls_ports = {each.tls.role: each.tls.port for each in listeners if each.tls is not None}
        path = self.directory / "sidecars.yaml"
        path.write_text(yaml.safe_dump(_bootstrap(listeners, self._host, self.admin_port)))
        with (self.directory / "envoy.log").open("wb") as log:
            # Two Envoys with the same base id would share memory.
            command = [str(ENVOY), "-c", str(path), "--concurrency", "1", "-l", "warn", "--use-dynamic-base-id"]
            inside = [] if self.network is None else self.network.inside(SITE)
            self._envoy = subprocess.Popen([*inside, *command], stdout=log, stderr=log)
        return [_behind(spec, listeners) for spec in specs]

    def _encrypted(self, spec: ServiceSpec) -> "_Encrypted | None":
        if not self.mutual:
            return None
        (role,) = [Role(name) for name, module in MODULES.items() if module == spec.module]
        server = certified(self.directory, role, spec.name)
        return _Encrypted(role, free_port(), server, certified(self.directory, Role.GATEWAY, "a caller"))

    async def calls(self) -> dict[str, int]:
        """How many calls went through Envoy, by the service's port."""
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
    """The address of a service, and the one at which others reach it."""

    service_host: str
    service_port: int
    host: str
    port: int
    tls: "_Encrypted | None"

    @property
    def cluster(self) -> str:
        return str(self.service_port)

    @property
    def service(self) -> str:
        return f"{self.service_host}:{self.service_port}"


@dataclass(frozen=True)
class _Encrypted:
    """Where the service's side listens, and the certificates that both sides show."""

    role: Role
    port: int
    server: TlsConfig
    client: TlsConfig


@contextmanager
def sidecars(directory: Path, network: Network | None = None, *, mutual: bool = False) -> Iterator[Sidecars]:
    running = Sidecars(directory, network, mutual)
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
    resources: dict[str, list[dict[str, Any]]] = {"listeners": [], "clusters": []}
    for each in listeners:
        outside = (each.host, each.port)
        if each.tls is None:
            hops = [_hop(each.cluster, outside, (each.service_host, each.service_port))]
        else:
            between = (each.host, each.tls.port)
            hops = [
                _hop(each.cluster, outside, between, calls_with=each.tls),
                _hop(f"{each.cluster}-inside", between, (each.service_host, each.service_port), serves_with=each.tls),
            ]
        for listener, cluster in hops:
            resources["listeners"].append(listener)
            resources["clusters"].append(cluster)
    return {"admin": {"address": _address(admin_host, admin_port)}, "static_resources": resources}


def _hop(
    name: str,
    listens: tuple[str, int],
    calls: tuple[str, int],
    *,
    calls_with: _Encrypted | None = None,
    serves_with: _Encrypted | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """A listener and the cluster behind it."""
    manager = {
        "@type": f"{_EXTENSIONS}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": name,
        "codec_type": "HTTP2",
        "stream_idle_timeout": "0s",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": name,
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": name, "timeout": "0s"}}],
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
    options = {
        "@type": f"{_EXTENSIONS}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    chain: dict[str, Any] = {
        "filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    }
    listener = {"name": name, "address": _address(*listens), "filter_chains": [chain]}
    cluster: dict[str, Any] = {
        "name": name,
        "connect_timeout": "1s",
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(*calls)}}]}],
        },
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options},
    }
    if serves_with is not None:
        context = {**_context("Downstream", serves_with.server, Role.GATEWAY), "require_client_certificate": True}
        chain["transport_socket"] = _transport_socket(context)
    if calls_with is not None:
        name_of_role = {"sni": server_name(calls_with.role)}
        cluster["transport_socket"] = _transport_socket(
            {**_context("Upstream", calls_with.client, calls_with.role), **name_of_role}
        )
    return listener, cluster


def _context(side: str, own: TlsConfig, peer: Role) -> dict[str, Any]:
    """The TLS context of one side: the certificate that it shows, and the peer that it accepts."""
    return {
        "@type": f"{_EXTENSIONS}.transport_sockets.tls.v3.{side}TlsContext",
        "common_tls_context": {
            "alpn_protocols": ["h2"],
            "tls_certificates": [
                {"certificate_chain": {"filename": str(own.certificate)}, "private_key": {"filename": str(own.key)}}
            ],
            "validation_context": {
                "trusted_ca": {"filename": str(own.ca)},
                "match_typed_subject_alt_names": [{"san_type": "DNS", "matcher": {"exact": server_name(peer)}}],
            },
        },
    }


def _transport_socket(context: dict[str, Any]) -> dict[str, Any]:
    return {"name": "envoy.transport_sockets.tls", "typed_config": context}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
