"""`deepmesh certs`."""

import ssl
import stat
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.commands import build
from mesh.errors import ConfigError
from mesh.rpc.identity import Identity, Role
from mesh.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE


def make(directory: Path, *arguments: str) -> str:
    done = CliRunner().invoke(build(), ["certs", "--out", str(directory), *arguments], catch_exceptions=False)
    assert done.exit_code == 0
    return done.stdout


def load(directory: Path) -> None:
    """Raises SSLError if key and certificate do not fit."""
    ssl.create_default_context(cafile=directory / CA_FILE).load_cert_chain(
        directory / CERTIFICATE_FILE, directory / KEY_FILE
    )


def test_every_role_gets_a_certificate_and_private_key(tmp_path: Path) -> None:
    make(tmp_path)
    for role in Role:
        [directory] = (tmp_path / role.value).iterdir()
        load(directory)
        assert stat.S_IMODE((directory / KEY_FILE).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "ca-key.pem").stat().st_mode) == 0o600


def test_a_second_run_signs_more_with_the_same_ca(tmp_path: Path) -> None:
    make(tmp_path)
    ca = (tmp_path / CA_FILE).read_bytes()
    assert Identity(Role.DECODE, "10.0.0.7:8010").uri in make(tmp_path, "--name", "decode/10.0.0.7:8010")
    load(tmp_path / "decode" / "10.0.0.7%3A8010")
    assert (tmp_path / "decode" / "10.0.0.7%3A8010" / CA_FILE).read_bytes() == ca


@pytest.mark.parametrize("name", ["decode", "king/x", "decode/"])
def test_a_name_without_a_role_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="expected ROLE/NAME"):
        make(tmp_path, "--name", name)
