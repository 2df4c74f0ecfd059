import pytest

from mesh.errors import ConfigError
from transfer.config import TransferConfig
from transfer.network import devices_of, missing_devices, opened_devices
from transfer.ucx_settings import ucx_settings


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2", "::1"])
def test_a_loopback_address_is_that_of_the_loopback_device(host: str) -> None:
    assert devices_of(host) == "lo"


def test_every_address_is_that_of_all_devices() -> None:
    assert devices_of("0.0.0.0") == devices_of("::") == "all"


@pytest.mark.parametrize("host", ["203.0.113.7", "no.such.host.invalid"])
def test_an_address_of_another_machine_is_a_configuration_error(host: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.host"):
        devices_of(host)


def test_devices_that_are_named_stay_in_force() -> None:
    config = TransferConfig(devices="eth7").listening_on("127.0.0.1")
    assert ucx_settings(None, config.devices)["NET_DEVICES"] == "eth7"


@pytest.mark.parametrize(
    ("asked", "missing"),
    [
        ("all", []),
        ("^mlx5_9:1", []),
        ("lo", []),
        ("mlx5_0:1,lo", []),
        ("mlx5_0", []),
        ("mlx5_*", []),
        ("mlx5_1:1, mlx5_0:1", ["mlx5_1:1"]),
        ("mlx5_0:2,nix0", ["mlx5_0:2", "nix0"]),
    ],
)
def test_devices_that_ucx_or_the_system_has_are_there(asked: str, missing: list[str]) -> None:
    lines = ("md 0  dev 0  flags -- self/memory", "md 1  dev 1  flags -- rc_mlx5/mlx5_0:1")
    description = "".join(f"#      resource {number}  :  {line}\n" for number, line in enumerate(lines))
    opened = opened_devices(description)
    assert opened == {"memory", "mlx5_0:1"}
    assert missing_devices(asked, opened) == missing
