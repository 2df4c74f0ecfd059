import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.fetch.lookup import Lookup, fetch_key, session_message, split_hashes, split_session_message
from transfer.seal import Kind, unseal

KEY = bytes(range(32))


@given(st.integers(0, 2**64 - 1), st.binary())
def test_a_lookup_names_its_session_and_opens_with_its_key(session_id: int, hashes: bytes) -> None:
    lookup = Lookup(1, 2, b"address", 3, 4, 5, 6, hashes)
    split = split_session_message(session_message(Kind.LOOKUP, session_id, KEY, lookup))
    assert split is not None
    claimed, sealed = split
    assert claimed == session_id and unseal(Kind.LOOKUP, KEY, sealed, Lookup) == lookup


@pytest.mark.parametrize("length", [0, 7, 8])
def test_what_is_too_short_claims_no_session(length: int) -> None:
    assert split_session_message(bytes(length)) is None


def test_each_lookup_has_its_own_digest_key() -> None:
    assert fetch_key(KEY, 1) != fetch_key(KEY, 2) != fetch_key(bytes(32), 2)


@given(st.lists(st.binary(min_size=16, max_size=16)))
def test_hashes_split_as_they_were_joined(hashes: list[bytes]) -> None:
    assert split_hashes(b"".join(hashes)) == hashes
