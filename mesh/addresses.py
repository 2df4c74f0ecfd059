"""Addresses of services: host:port."""

import ipaddress
import re
from typing import Annotated

from pydantic import AfterValidator

LOCALHOST = "localhost"
_WITH_PORT = re.compile(r"(\[[^]/]+]|[^][:/\s]+):\d{1,5}")


def host_of(address: str) -> str:
    """The host of "host:port", of "[::1]:port", or of an address without a port."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    host, colon, _ = address.partition(":")
    # More than one colon, and no brackets: an IPv6 address without a port.
    return address if colon and address.count(":") > 1 else host


def checked_address(address: str) -> str:
    """The address. Raises ValueError if it has no port, or is a URL."""
    if _WITH_PORT.fullmatch(address) is None:
        raise ValueError(f"expected host:port, not {address!r}")
    return address


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


# Types of keys of a configuration: one address, or several separated by commas.
Address = Annotated[str, AfterValidator(checked_address)]
Addresses = Annotated[str, AfterValidator(checked_addresses)]
