"""A certificate authority for development and tests. Its certificates name a role and a service."""

import datetime
import ipaddress
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from mesh.errors import ConfigError
from mesh.rpc.identity import Identity
from mesh.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE, server_name

CA_KEY_FILE = "ca-key.pem"
_NAME = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "deepmesh development CA")])
# Clocks differ, so a certificate is valid from a little before it is made.
CLOCK_SKEW = datetime.timedelta(minutes=5)


class Authority:
    """A CA of the mesh. Whoever has its key can be any service."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate, days: int) -> None:
        self._key = key
        self._certificate = certificate
        self._days = days

    @classmethod
    def new(cls, days: int) -> Self:
        """A new CA. Its own certificate, and those that it issues, are valid for `days` days."""
        key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        certificate = (
            _builder(_NAME, _NAME, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(key, certificate, days)

    @classmethod
    def in_directory(cls, directory: Path, days: int) -> Self:
        """The CA that is in this directory, or a new one. Raises ConfigError."""
        key_path, certificate_path = directory / CA_KEY_FILE, directory / CA_FILE
        if key_path.exists() and certificate_path.exists():
            try:
                key = serialization.load_pem_private_key(key_path.read_bytes(), None)
                certificate = x509.load_pem_x509_certificate(certificate_path.read_bytes())
            except (OSError, ValueError) as error:
                raise ConfigError(f"{directory} has no CA that can be read: {error}") from error
            if not isinstance(key, ec.EllipticCurvePrivateKey):
                raise ConfigError(f"{key_path} is no key of an elliptic curve")
            return cls(key, certificate, days)
        made = cls.new(days)
        directory.mkdir(parents=True, exist_ok=True)
        _write_private(key_path, _private_bytes(made._key))
        certificate_path.write_bytes(made.pem)
        return made

    @property
    def pem(self) -> bytes:
        """The CA's own certificate."""
        data: bytes = self._certificate.public_bytes(serialization.Encoding.PEM)
        return data

    def issue(self, identity: Identity, directory: Path, hosts: Sequence[str] = ()) -> None:
        """Write a certificate for this identity, its key and the CA's certificate into the directory, which is created.

        `hosts`: names and addresses by which clients call the service if they check no role: a gateway's clients.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.UniformResourceIdentifier(identity.uri), x509.DNSName(server_name(identity.role))]
        usages = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        certificate = (
            _builder(x509.Name([]), _NAME, key.public_key(), self._days)
            .add_extension(x509.SubjectAlternativeName([*names, *map(_host, hosts)]), critical=True)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(usages, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        directory.mkdir(parents=True, exist_ok=True)
        _write_private(directory / KEY_FILE, _private_bytes(key))
        (directory / CERTIFICATE_FILE).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        (directory / CA_FILE).write_bytes(self.pem)


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private_bytes(key: ec.EllipticCurvePrivateKey) -> bytes:
    plain = serialization.NoEncryption()
    data: bytes = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return data


def _write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, from its first byte on."""
    path.unlink(missing_ok=True)
    path.touch(mode=0o600)
    path.write_bytes(data)
