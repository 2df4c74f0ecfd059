import msgspec
from hypothesis import given
from hypothesis import strategies as st

from transfer.fetch.lookup import Answer, Lookup
from transfer.seal import Kind, seal, unseal
from transfer.ticket import Announcement

KEY = bytes(range(32))
numbers = st.integers(0, 2**63 - 1)
lookups = st.builds(Lookup, numbers, numbers, st.binary(max_size=300), numbers, numbers, numbers, numbers, st.binary())
answers = st.builds(Answer, numbers, numbers, numbers)
checksums = st.builds(Announcement, numbers, numbers, st.binary(max_size=16), st.text(max_size=9))
messages = st.one_of(
    st.tuples(st.just(Kind.LOOKUP), lookups),
    st.tuples(st.just(Kind.ANSWER), answers),
    st.tuples(st.just(Kind.ANNOUNCEMENT), checksums),
)


@given(messages)
def test_a_sealed_message_opens_as_it_was(kind_and_message: tuple[Kind, msgspec.Struct]) -> None:
    kind, message = kind_and_message
    assert unseal(kind, KEY, seal(kind, KEY, message), type(message)) == message


@given(checksums, st.data())
def test_a_message_with_any_bit_flipped_does_not_open(message: Announcement, data: st.DataObject) -> None:
    sealed = bytearray(seal(Kind.ANNOUNCEMENT, KEY, message))
    bit = data.draw(st.integers(0, len(sealed) * 8 - 1))
    sealed[bit // 8] ^= 1 << bit % 8
    assert unseal(Kind.ANNOUNCEMENT, KEY, bytes(sealed), Announcement) is None


@given(st.binary(max_size=100))
def test_noise_does_not_open(noise: bytes) -> None:
    assert unseal(Kind.LOOKUP, KEY, noise, Lookup) is None


def test_a_message_of_one_kind_does_not_pass_for_another() -> None:
    assert unseal(Kind.LOOKUP, KEY, seal(Kind.ANSWER, KEY, Answer(1, 2, 3)), Answer) is None


def test_a_body_of_a_wrong_shape_does_not_open() -> None:
    assert unseal(Kind.LOOKUP, KEY, seal(Kind.LOOKUP, KEY, Answer(1, 2, 3)), Lookup) is None


def test_another_key_does_not_open() -> None:
    assert unseal(Kind.ANSWER, bytes(32), seal(Kind.ANSWER, KEY, Answer(1, 2, 3)), Answer) is None
