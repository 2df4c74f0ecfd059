"""Certificates for tests, from one development CA for each process."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from cli.authority import Authority
from mesh.config import TlsConfig
from mesh.rpc.channel import Channels, MutualTlsChannels
from mesh.rpc.identity import Identity, Role
from mesh.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE


@cache
def authority() -> Authority:
    return Authority.new(days=1)


def files_in(directory: Path) -> TlsConfig:
    return TlsConfig(certificate=directory / CERTIFICATE_FILE, key=directory / KEY_FILE, ca=directory / CA_FILE)


def certified(
    directory: Path, role: Role, name: str, ca: Authority | None = None, hosts: Sequence[str] = ()
) -> TlsConfig:
    """Issue a new certificate for that service, with its files in a folder of its own."""
    own = directory / f"{role.value}-{abs(hash(name))}"
    (ca or authority()).issue(Identity(role, name), own, hosts)
    return files_in(own)


def channels_as(directory: Path, role: Role, name: str) -> Channels:
    """Channels that show that service's certificate."""
    return MutualTlsChannels(certified(directory, role, name))
