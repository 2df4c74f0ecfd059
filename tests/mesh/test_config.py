from pathlib import Path

import pytest
from pydantic import Field, SecretStr, ValidationError

from gateway.config import GatewayConfig
from mesh.config import Config, ObserveConfig, ServerConfig, ServiceConfig
from mesh.config_values import load, overridden
from mesh.errors import ConfigError
from scheduler.config import SchedulerConfig


class Inner(Config):
    size: int = Field(default=1, ge=1)
    name: str | None = None


class Outer(Config):
    inner: Inner = Inner()
    words: tuple[str, ...] = ()
    perhaps: Inner | None = None
    several: tuple[Inner, ...] = ()


class Login(Config):
    name: str = Field(default="someone", max_length=8)
    key: SecretStr | None = Field(default=None, min_length=8)
    rooms: tuple[int, ...] = Field(default=(1,), min_length=1)


def written(directory: Path, text: str) -> Path:
    path = directory / "service.yaml"
    path.write_text(text)
    return path


def test_an_address_without_a_port_is_told_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"scheduler: expected host:port, not 'localhost'"):
        load(GatewayConfig, overrides=["scheduler=localhost"])
    with pytest.raises(ConfigError, match=r"stores\.1: expected host:port, not 'b'"):
        load(SchedulerConfig, overrides=["stores=[a:1, b]"])


def test_no_file_gives_the_defaults() -> None:
    assert load(Outer) == Outer()


def test_a_file_and_overrides_compose(tmp_path: Path) -> None:
    path = written(tmp_path, "inner:\n  size: 3\n  name: from file\n")
    config = load(Outer, path, ["inner.size=5", "words=[a, b]"])
    assert config == Outer(inner=Inner(size=5, name="from file"), words=("a", "b"))


def test_an_overlay_replaces_its_keys_and_keeps_the_rest(tmp_path: Path) -> None:
    path, overlay = written(tmp_path, "inner: {size: 3, name: public}\nwords: [a, b]\n"), tmp_path / "secret.yaml"
    overlay.write_text("inner: {name: secret}\nwords: [c]\nperhaps: {size: 2}\n")
    expected = Outer(inner=Inner(size=3, name="secret"), words=("c",), perhaps=Inner(size=2))
    assert load(Outer, path, overlays=[overlay]) == expected


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load(Outer, written(tmp_path, "")) == Outer()


def test_the_later_override_wins() -> None:
    assert load(Outer, None, ["inner.size=2", "inner.size=3"]).inner.size == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("key=sesame", "key: expected at least 8 characters"),
        ("name=somebody else", "name: expected at most 8 characters"),
        ("rooms=[]", "rooms: expected at least 1 value"),
    ],
)
def test_an_error_about_length_names_the_unit_without_the_value(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(Login, None, [override])
    assert caught.value.message == f"configuration: {message}"


def test_text_of_another_form_is_answered_by_an_example() -> None:
    with pytest.raises(ConfigError) as caught:
        load(ObserveConfig, None, ["otlp_endpoint=nonsense"])
    assert caught.value.message == "configuration: otlp_endpoint: expected text such as http://127.0.0.1:4317"


def test_an_override_can_unset_a_value(tmp_path: Path) -> None:
    assert load(Outer, written(tmp_path, "inner: {name: x}"), ["inner.name=null"]).inner.name is None


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["inner.sise=2"], "inner.sise"),
        (["inner.size=0"], "inner.size"),
        (["inner.size=many"], "inner.size"),
        (["inner.size"], "expected key=value"),
        (["=1"], "expected key=value"),
        (["words=[1", "inner.size=1"], "override of words: its value is no YAML \\(line 1, column 3\\)"),
        (["words=a", "words.first=b"], "words holds a value"),
    ],
)
def test_a_wrong_override_is_named(overrides: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(Outer, None, overrides)


@pytest.mark.parametrize("value", ["'s3cret", "s3cret: s3cret: a", "*s3cret", "[s3cret"])
def test_a_value_that_is_no_yaml_is_not_quoted(value: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"words: {value}\n")
    for path, overrides in ((None, [f"words={value}"]), (tmp_path / "config.yaml", [])):
        with pytest.raises(ConfigError, match=r"words|config\.yaml") as caught:
            load(Outer, path, overrides)
        assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("colour=red", "unknown key colour: the keys are inner, perhaps, several, words"),
        ("inner.colour=2", "unknown key inner.colour: the keys of inner are name, size"),
        ("several=[{}, {colour: 2}]", "unknown key several.1.colour: the keys of several.1 are name, size"),
        ("inner.sise=2", "unknown key inner.sise (did you mean inner.size?)"),
        ("perhaps.sise=2", "unknown key perhaps.sise (did you mean perhaps.size?)"),
        ("several=[{}, {sise: 2}]", "unknown key several.1.sise (did you mean several[].size?)"),
        ("size=2", "unknown key size (did you mean inner.size?)"),
    ],
)
def test_an_unknown_key_is_named_with_what_was_meant(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(Outer, None, [override])
    assert raised.value.message == f"configuration: {words}"


def test_an_error_names_every_source_of_a_wrong_key(tmp_path: Path) -> None:
    path, overlay = written(tmp_path, "words: [a]\n"), tmp_path / "secret.yaml"
    overlay.write_text("words: [b]\n")
    with pytest.raises(ConfigError) as raised:
        load(Outer, path, ["colour=red"], overlays=[overlay])
    assert raised.value.message.startswith(f"{path} with {overlay} with --set: unknown key colour")


class Room(Config):
    number: int = Field(ge=1)
    key: Path


class House(Config):
    rooms: tuple[Room, ...] = ()
    cellar: Room | None = None


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("cellar={number: 1}", "missing key cellar.key: expected path"),
        ("rooms=[{number: 1, key: a}, {key: b}]", "missing key rooms.1.number: expected integer >= 1"),
        ("cellar={}", "missing key cellar.number: expected integer >= 1; missing key cellar.key: expected path"),
    ],
)
def test_a_missing_key_is_named_with_what_it_must_be(override: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load(House, None, [override])
    assert raised.value.message == f"configuration: {words}"


def test_each_offending_key_is_named_with_its_file(tmp_path: Path) -> None:
    path = written(tmp_path, "inner: {size: -1}\ncolour: red\n")
    with pytest.raises(ConfigError) as raised:
        load(Outer, path)
    assert all(part in raised.value.message for part in (str(path), "inner.size", "colour"))


@pytest.mark.parametrize("text", ["inner: [unclosed", "- a list", "just text"])
def test_a_file_that_is_no_mapping_is_a_config_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"service\.yaml"):
        load(Outer, written(tmp_path, text))


def test_a_missing_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent\.yaml"):
        load(Outer, tmp_path / "absent.yaml")


def test_a_loaded_configuration_cannot_change() -> None:
    with pytest.raises(ValidationError):
        load(Outer).inner = Inner(size=9)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_out_of_range_is_refused(port: int) -> None:
    with pytest.raises(ConfigError, match=r"server\.port"):
        load(ServiceConfig, None, [f"server.port={port}"])


def test_services_listen_on_loopback_unless_told_otherwise() -> None:
    assert ServerConfig().host == "127.0.0.1"


@pytest.mark.parametrize("addresses", ["[::1]:8002", "[::1]:8002,[2001:db8::1]:8002", "::1"])
def test_ipv6_addresses_need_no_quotes(addresses: str) -> None:
    assert overridden([f"scheduler={addresses}"]) == {"scheduler": addresses}


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "scheduler"])
def test_off_loopback_a_service_needs_certificates_or_an_explicit_setting(host: str) -> None:
    with pytest.raises(ConfigError, match=r"is not loopback: services must have certificates there"):
        load(ServiceConfig, None, [f"server.host='{host}'"])
    assert load(ServiceConfig, None, [f"server.host='{host}'", "security.plaintext=true"]).security.plaintext
    files = "security.tls={certificate: c.pem, key: k.pem, ca: ca.pem}"
    assert load(ServiceConfig, None, [f"server.host='{host}'", files]).security.tls is not None


def test_plaintext_and_certificates_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        load(ServiceConfig, None, ["security={plaintext: true, tls: {certificate: c, key: k, ca: ca}}"])
