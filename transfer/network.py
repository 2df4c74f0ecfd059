"""Finds the network devices that UCX may use."""

import ipaddress
import socket

import psutil

from mesh.errors import ConfigError

ALL_DEVICES = "all"
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
