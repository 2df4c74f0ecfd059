import pytest

from mesh.addresses import is_loopback, split_addresses


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
