"""A mesh whose services reach each other over IPv6."""

import socket
from collections.abc import Sequence
from dataclasses import replace

import pytest

from launcher.plan import HOST, MODULES, ServiceSpec
from mesh.addresses import with_port

LOOPBACK = "::1"


def has_ipv6() -> bool:
    """Whether this machine has IPv6's loopback."""
    try:
        with socket.create_server((LOOPBACK, 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


def over_ipv6(specs: Sequence[ServiceSpec]) -> list[ServiceSpec]:
    return [_over_ipv6(spec) for spec in specs]


def _over_ipv6(spec: ServiceSpec) -> ServiceSpec:
    settings = [each.replace(f"{HOST}:", with_port(LOOPBACK, 0).removesuffix("0")) for each in spec.settings]
    settings.append(f"server.host={LOOPBACK}")
    if spec.module == MODULES["gateway"]:
        settings.append(f"http.host={LOOPBACK}")
    return replace(spec, settings=tuple(settings), host=LOOPBACK)
