"""TLS from files, which are read again when they change."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

import grpc

from mesh.config import TlsConfig
from mesh.errors import ConfigError
from mesh.rpc.identity import Role

CERTIFICATE_FILE = "certificate.pem"
KEY_FILE = "key.pem"
CA_FILE = "ca.pem"

_log = logging.getLogger("deepmesh.tls")


def server_name(role: Role) -> str:
    """The DNS name in the certificate of every service of a role.

    Clients check it instead of the host that they call: they know which role must answer, while hosts and addresses
    change.
    """
    return f"{role.value}.deepmesh.internal"


@dataclass(frozen=True, slots=True)
class Pem:
    """Contents of the files. `ca` is None if the server does not ask callers for certificates."""

    certificate: bytes
    key: bytes
    ca: bytes | None

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.certificate)

    def server_configuration(self) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(self.key, self.certificate)], self.ca)


class CertificateFiles:
    """The PEM files of a service: read once at first (ConfigError if that fails), and again whenever they change.

    Certificate and key are two files, so during a renewal they do not match for a moment. gRPC's servers keep the old
    pair until they get one that matches, which is read as soon as the second file has changed too. If a file is
    missing, the last contents stay in use.
    """

    def __init__(self, certificate: Path, key: Path, ca: Path | None = None) -> None:
        self._paths = [path for path in (certificate, key, ca) if path is not None]
        try:
            self._stamps, self.pem = self._stamp(), self._read()
        except OSError as error:
            raise ConfigError(f"security.tls: cannot read {error.filename}: {error.strerror}") from error

    @classmethod
    def of(cls, config: TlsConfig) -> Self:
        return cls(config.certificate, config.key, config.ca)

    def read_again(self) -> Pem | None:
        """The contents if the files changed since they were last read, otherwise None. Costs three calls of stat."""
        try:
            stamps = self._stamp()
            if stamps == self._stamps:
                return None
            # The stamps are taken before reading: if the files change in between, they are read once more.
            self.pem, self._stamps = self._read(), stamps
        except OSError as error:
            _log.warning("certificates cannot be read: the last ones stay", extra={"fields": {"why": str(error)}})
            return None
        _log.info("certificates read again", extra={"fields": {"file": str(self._paths[0])}})
        return self.pem

    def _stamp(self) -> list[tuple[int, int, int]]:
        return [(found.st_mtime_ns, found.st_ino, found.st_size) for found in map(Path.stat, self._paths)]

    def _read(self) -> Pem:
        certificate, key, *ca = [path.read_bytes() for path in self._paths]
        return Pem(certificate, key, ca[0] if ca else None)


@dataclass(frozen=True, slots=True)
class ServerTls:
    """How a server uses TLS. `mutual`: callers must show certificates, which name them."""

    credentials: grpc.ServerCredentials
    mutual: bool


def server_tls(config: TlsConfig | None) -> ServerTls | None:
    """TLS of a server that only services of the mesh call; None is plaintext. Raises ConfigError."""
    return None if config is None else _server(CertificateFiles.of(config), mutual=True)


def for_clients(certificate: Path, key: Path) -> ServerTls:
    """TLS of a server whose callers have no certificates. Raises ConfigError."""
    return _server(CertificateFiles(certificate, key), mutual=False)


def _server(files: CertificateFiles, mutual: bool) -> ServerTls:
    def renewed() -> grpc.ServerCertificateConfiguration | None:
        pem = files.read_again()
        return None if pem is None else pem.server_configuration()

    first = files.pem.server_configuration()
    # gRPC takes None as "no change", which its types do not declare.
    fetch = cast(Callable[[], grpc.ServerCertificateConfiguration], renewed)
    return ServerTls(grpc.dynamic_ssl_server_credentials(first, fetch, mutual), mutual)
