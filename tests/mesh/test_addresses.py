import pytest

from mesh.addresses import (
    bracketed,
    callable_host,
    checked_address,
    checked_addresses,
    checked_host,
    host_of,
    is_loopback,
    split_addresses,
    with_port,
)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3:80", "localhost:1", "::1", "[::1]:8002", "[::1]"])
def test_loopback_is_recognized(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize(
    "address", ["", "0.0.0.0", "::", "[::]:1", "10.0.0.1:80", "scheduler:8002", "localhost.evil:1"]
)
def test_what_others_can_reach_is_no_loopback(address: str) -> None:
    assert not is_loopback(address)


@pytest.mark.parametrize("written", ["a:1,b:2", "a:1, b:2", "a:1,b:2,", ",a:1,, b:2 ,"])
def test_a_comma_more_is_no_address(written: str) -> None:
    assert split_addresses(written) == ("a:1", "b:2")


@pytest.mark.parametrize("written", ["", " ", ","])
def test_a_list_of_no_address_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match="expected host:port"):
        split_addresses(written)


@pytest.mark.parametrize(
    "address", ["localhost", "http://localhost:80", "a:", "a:b", "", "a:1,b", "a:1:", "::1", "a:65536"]
)
def test_an_address_without_a_port_and_a_url_are_refused(address: str) -> None:
    with pytest.raises(ValueError, match="expected host:port, not"):
        checked_addresses(address or "/")


@pytest.mark.parametrize(
    ("host", "written"), [("a", "a:1"), ("127.0.0.1", "127.0.0.1:1"), ("fe80::1%lo", "[fe80::1%lo]:1")]
)
def test_an_ipv6_address_with_a_port_stands_in_brackets(host: str, written: str) -> None:
    assert with_port(host, 1) == written
    assert host_of(written) == host
    assert checked_address(written) == written


@pytest.mark.parametrize(
    ("written", "address"),
    [("fd00::7:8010", "[fd00::7]:8010"), ("[fd00::7]:8010", "[fd00::7]:8010"), ("10.0.0.7:8010", "10.0.0.7:8010")],
)
def test_an_own_address_may_lack_its_brackets(written: str, address: str) -> None:
    assert bracketed(written) == address


@pytest.mark.parametrize(
    ("written", "host"), [("::1", "::1"), ("[::]", "::"), ("0.0.0.0", "0.0.0.0"), ("a.b-c", "a.b-c")]
)
def test_a_host_is_taken_without_its_brackets(written: str, host: str) -> None:
    assert checked_host(written) == host


@pytest.mark.parametrize("host", ["", "a:1", "[::1]:1", "http://a", "a b", "[a"])
def test_a_host_with_a_port_and_a_url_are_refused(host: str) -> None:
    with pytest.raises(ValueError, match="without a port"):
        checked_host(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_every_address_is_called_by_that_of_this_machine(host: str) -> None:
    assert is_loopback(callable_host(host))


@pytest.mark.parametrize("address", ["localhost:1", "a.b-c:65535", "[::1]:8002"])
def test_an_address_is_taken_as_it_is(address: str) -> None:
    assert checked_address(address) == address
    assert checked_addresses(f"{address}, b:2") == f"{address}, b:2"
