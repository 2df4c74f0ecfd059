import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer.lookup import Answer, Credit, Kind, Lookup, SentSegment, fetch_key, seal, session_of, split_hashes, unseal

KEY = bytes(range(32))
numbers = st.integers(0, 2**63 - 1)
lookups = st.builds(
    Lookup, numbers, numbers, st.binary(max_size=300), numbers, numbers, numbers, numbers, numbers, st.binary()
)
segments = st.builds(SentSegment, numbers, numbers, st.binary(max_size=16), st.text(max_size=9))
answers = st.builds(Answer, numbers, numbers, numbers, st.none() | segments)
credits = st.builds(Credit, numbers, numbers, numbers)
messages = st.one_of(
    st.tuples(st.just(Kind.LOOKUP), lookups),
    st.tuples(st.just(Kind.ANSWER), answers),
    st.tuples(st.just(Kind.CREDIT), credits),
)


@given(messages, numbers)
def test_a_sealed_message_opens_as_it_was(kind_and_message, session_id) -> None:
    kind, message = kind_and_message
    sealed = bytes(seal(kind, session_id, KEY, message))
    assert session_of(sealed) == session_id
    assert unseal(kind, KEY, sealed, type(message)) == message


@given(credits, st.data())
def test_a_message_with_any_bit_flipped_does_not_open(message, data) -> None:
    sealed = seal(Kind.CREDIT, 1, KEY, message)
    bit = data.draw(st.integers(0, len(sealed) * 8 - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    assert unseal(Kind.CREDIT, KEY, bytes(sealed), Credit) is None


@given(st.binary(max_size=100))
def test_noise_does_not_open(noise) -> None:
    assert unseal(Kind.LOOKUP, KEY, noise, Lookup) is None


def test_a_message_of_one_kind_does_not_pass_for_another() -> None:
    sealed = bytes(seal(Kind.CREDIT, 1, KEY, Credit(1, 2, 3)))
    assert unseal(Kind.ANSWER, KEY, sealed, Answer) is None


def test_a_body_of_a_wrong_shape_does_not_open() -> None:
    sealed = bytes(seal(Kind.LOOKUP, 1, KEY, Credit(1, 2, 3)))
    assert unseal(Kind.LOOKUP, KEY, sealed, Lookup) is None


def test_another_key_does_not_open() -> None:
    sealed = bytes(seal(Kind.CREDIT, 1, KEY, Credit(1, 2, 3)))
    assert unseal(Kind.CREDIT, bytes(32), sealed, Credit) is None


@pytest.mark.parametrize("length", [0, 8, 24])
def test_what_is_too_short_claims_no_session(length: int) -> None:
    assert session_of(bytes(length)) is None


def test_each_lookup_has_its_own_digest_key() -> None:
    assert fetch_key(KEY, 1) != fetch_key(KEY, 2) != fetch_key(bytes(32), 2)


@given(st.lists(st.binary(min_size=16, max_size=16)))
def test_hashes_split_as_they_were_joined(hashes) -> None:
    assert split_hashes(b"".join(hashes)) == hashes
