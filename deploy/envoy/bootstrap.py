"""Makes the configuration of an Envoy in front of the gateways.

`python deploy/envoy/bootstrap.py gateway-0:8001:8000 gateway-1:8001:8000 > envoy.yaml`, with HOST:GRPC_PORT:HTTP_PORT
of each gateway; then `envoy -c envoy.yaml`. A host name with several addresses stands for a gateway at each of them.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import yaml

_CONNECTION_MANAGER = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
# Longer than a gateway lets a generation take, because a stream is idle while its client waits for a long prompt.
_IDLE_SECONDS = "3700s"


@dataclass(frozen=True, slots=True)
class Gateway:
    host: str
    grpc_port: int
    http_port: int

    @classmethod
    def parse(cls, text: str) -> Self:
        host, grpc_port, http_port = text.rsplit(":", 2)
        return cls(host, int(grpc_port), int(http_port))


@dataclass(frozen=True)
class Listeners:
    """Where Envoy listens."""

    host: str = "0.0.0.0"
    grpc_port: int = 8001
    http_port: int = 8000
    # The admin port is on loopback alone.
    admin_port: int = 9901


def bootstrap(gateways: Sequence[Gateway], listeners: Listeners) -> dict[str, Any]:
    """The bootstrap file, as plain data."""
    return {
        "admin": {"address": _address("127.0.0.1", listeners.admin_port)},
        "static_resources": {
            "listeners": [
                _listener("grpc", listeners.host, listeners.grpc_port, _grpc_retries()),
                _listener("http", listeners.host, listeners.http_port, _http_retries()),
            ],
            "clusters": [_grpc_cluster(gateways), _http_cluster(gateways)],
        },
    }


def _listener(name: str, host: str, port: int, retries: dict[str, Any]) -> dict[str, Any]:
    route = {
        "cluster": name,
        # By default Envoy would end a healthy stream after 15 s.
        "timeout": "0s",
        "idle_timeout": _IDLE_SECONDS,
        "retry_policy": {
            **retries,
            "num_retries": 2,
            "retry_host_predicate": [_typed("envoy.retry_host_predicates.previous_hosts", _PREVIOUS_HOSTS)],
            "host_selection_retry_max_attempts": 3,
        },
    }
    manager = {
        "@type": f"type.googleapis.com/{_CONNECTION_MANAGER}",
        "stat_prefix": name,
        "codec_type": "AUTO",
        # gRPC's parser keeps 160 bytes for each entry, of which a stream may have any number, though it refuses that.
        "common_http_protocol_options": {"max_headers_count": 100},
        "stream_idle_timeout": _IDLE_SECONDS,
        "request_timeout": "0s",
        "route_config": {
            "virtual_hosts": [
                {"name": name, "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]},
            ]
        },
        "http_filters": [_typed("envoy.filters.http.router", "envoy.extensions.filters.http.router.v3.Router")],
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    return {"name": name, "address": _address(host, port), "filter_chains": [{"filters": filters}]}


_PREVIOUS_HOSTS = "envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"


def _grpc_retries() -> dict[str, Any]:
    # UNAVAILABLE means that this call did nothing. A connection that breaks before any answer means a dead gateway.
    # RESOURCE_EXHAUSTED is not retried: it names a delay, which only the client can wait.
    return {"retry_on": "unavailable,connect-failure,refused-stream,reset"}


def _http_retries() -> dict[str, Any]:
    return {"retry_on": "connect-failure,refused-stream,reset"}


def _grpc_cluster(gateways: Sequence[Gateway]) -> dict[str, Any]:
    options = {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {
            "http2_protocol_options": {"connection_keepalive": {"interval": "10s", "timeout": "5s"}},
        },
    }
    return {
        **_cluster("grpc", [(each.host, each.grpc_port) for each in gateways]),
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": options},
        # A draining gateway fails this check and gets no new calls, but its streams go on.
        "health_checks": [{**_health_check(), "grpc_health_check": {"service_name": "readiness"}}],
    }


def _http_cluster(gateways: Sequence[Gateway]) -> dict[str, Any]:
    return {
        **_cluster("http", [(each.host, each.http_port) for each in gateways]),
        "health_checks": [{**_health_check(), "http_health_check": {"path": "/health"}}],
    }


def _cluster(name: str, addresses: Sequence[tuple[str, int]]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _address(host, port)}} for host, port in addresses]
    return {
        "name": name,
        "type": "STRICT_DNS",
        "connect_timeout": "1s",
        "lb_policy": "LEAST_REQUEST",
        # By default unhealthy gateways get requests too if fewer than half are healthy.
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
        # A gateway that fails five calls in a row gets no calls for a while, even if its health check succeeds.
        "outlier_detection": {
            "consecutive_gateway_failure": 5,
            "enforcing_consecutive_gateway_failure": 100,
            "interval": "1s",
            "base_ejection_time": "10s",
            "max_ejection_percent": 50,
        },
    }


def _health_check() -> dict[str, Any]:
    return {
        "timeout": "1s",
        "interval": "1s",
        "no_traffic_interval": "1s",
        "unhealthy_threshold": 2,
        "healthy_threshold": 1,
    }


def _typed(name: str, message: str) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": f"type.googleapis.com/{message}"}}


def _address(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes Envoy's configuration in front of gateways.")
    parser.add_argument("gateways", nargs="+", type=Gateway.parse, metavar="HOST:GRPC_PORT:HTTP_PORT")
    parser.add_argument("--grpc-port", type=int, default=Listeners.grpc_port)
    parser.add_argument("--http-port", type=int, default=Listeners.http_port)
    parser.add_argument("--admin-port", type=int, default=Listeners.admin_port)
    options = parser.parse_args()
    listeners = Listeners(grpc_port=options.grpc_port, http_port=options.http_port, admin_port=options.admin_port)
    sys.stdout.write(yaml.safe_dump(bootstrap(options.gateways, listeners), sort_keys=False))


if __name__ == "__main__":
    main()
