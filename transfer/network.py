"""Finds the network devices that UCX may use."""

import ipaddress
import re
import socket
from collections.abc import Collection
from fnmatch import fnmatchcase

import psutil

from mesh.errors import ConfigError

ALL_DEVICES = "all"
# A line of a UCX context's description, which ends in transport/device.
_RESOURCE = re.compile(r"resource +\d+ .*/(\S+)$", re.MULTILINE)
_LOOPBACK = ipaddress.ip_address("127.0.0.1")


def devices_of(host: str) -> str:
    """The device with this address; "all" if the address means every device. Raises ConfigError if no device has it."""
    try:
        found = {ipaddress.ip_address(each[4][0]) for each in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise ConfigError(f"server.host={host!r} is no address of this machine: {error}") from error
    if any(address.is_unspecified for address in found):
        return ALL_DEVICES
    # All of 127.0.0.0/8 belongs to the loopback device, which lists only one address.
    addresses = {str(_LOOPBACK if address.is_loopback else address) for address in found}
    for device, entries in psutil.net_if_addrs().items():
        if any(entry.address in addresses for entry in entries):
            return device
    raise ConfigError(f"no network device has server.host={host!r}: name UCX's in transfer.devices, or 'all'")


def opened_devices(description: str) -> set[str]:
    """The devices of a UCX context, by its description (ucp_context_print_info)."""
    return set(_RESOURCE.findall(description))


def missing_devices(asked: str, opened: Collection[str]) -> list[str]:
    """Those of the devices that are not there. UCX goes on without them, perhaps without any network.

    asked: as UCX_NET_DEVICES has it, where an RDMA device may lack its port; opened: by UCX. The system's own network
    interfaces are there, also if the chosen transports use none of them.
    """
    if asked == ALL_DEVICES or asked.startswith("^"):
        return []
    names = {*opened, *(name.partition(":")[0] for name in opened), *psutil.net_if_addrs()}
    wanted = [each.strip() for each in asked.split(",")]
    return [each for each in wanted if not any(fnmatchcase(name, each) for name in names)]
