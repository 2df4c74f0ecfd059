"""Addresses of services: host:port."""

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator

LOCALHOST = "localhost"
# What "every address" is called by from this machine.
_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}
_HOST = re.compile(r"[^][/\s]+")
_WITH_PORT = re.compile(r"(?:\[[^]/]+]|[^][:/\s]+):(\d{1,5})")
_HIGHEST_PORT = 65535


def host_of(address: str) -> str:
    """The host of "host:port", of "[::1]:port", or of an address without a port."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    host, colon, _ = address.partition(":")
    # More than one colon, and no brackets: an IPv6 address without a port.
    return address if colon and address.count(":") > 1 else host


def with_port(host: str, port: int) -> str:
    """host:port; an IPv6 address stands in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def callable_host(host: str) -> str:
    """A host at which this machine reaches a server that listens on `host`, which may mean every address."""
    return _LOOPBACK_OF.get(host, host)


def checked_host(host: str) -> str:
    """The host, an IPv6 address without its brackets. Raises ValueError if it has a port, or is a URL."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if (":" in bare and not _is_ipv6(bare)) or _HOST.fullmatch(bare) is None:
        raise ValueError(f"expected a name or an address without a port, not {host!r}")
    return bare


def is_ipv6(text: str) -> bool:
    """Whether this is an IPv6 address, or several separated by commas, with or without ports."""
    return all(_is_ipv6(host_of(each)) for each in map(str.strip, text.split(",")))


def checked_address(address: str) -> str:
    """The address. Raises ValueError if it has no port, or none that there can be, or is a URL."""
    match = _WITH_PORT.fullmatch(address)
    if match is None or int(match[1]) > _HIGHEST_PORT:
        raise ValueError(f"expected host:port, not {address!r}")
    return address


def bracketed(address: str) -> str:
    """host:port, in which an IPv6 address may lack its brackets, as where a pod's address and a port are put together.
    Raises ValueError for any other address.
    """
    host, _, port = address.rpartition(":")
    return checked_address(f"[{host}]:{port}" if _is_ipv6(host) else address)


def checked_addresses(addresses: str) -> str:
    """The list of addresses. Raises ValueError if it is empty, or one has no port."""
    for address in split_addresses(addresses):
        checked_address(address)
    return addresses


def split_addresses(addresses: str) -> tuple[str, ...]:
    """Splits a list of addresses that are separated by commas; empty entries are dropped. Raises ValueError if none is
    left.
    """
    split = tuple(stripped for address in addresses.split(",") if (stripped := address.strip()))
    if not split:
        raise ValueError("expected host:port, or several separated by commas")
    return split


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach the address. A name other than localhost counts as reachable by others."""
    host = host_of(address)
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == LOCALHOST


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


# Types of keys of a configuration: a host, one address, or several separated by commas.
Host = Annotated[str, AfterValidator(checked_host)]
Address = Annotated[str, AfterValidator(checked_address)]
OwnAddress = Annotated[str, AfterValidator(bracketed)]
Addresses = Annotated[str, AfterValidator(checked_addresses)]
