from hypothesis import given
from hypothesis import strategies as st

from gateway.text.detokenizer import Detokenizer
from tests.support.fake_decode import VOCABULARY
from tests.support.gateways import model_texts
from tools.byte_tokenizer import build_tokenizer

LIBRARY = build_tokenizer(VOCABULARY)


def pieces_of(data: bytes) -> st.SearchStrategy[list[bytes]]:
    cuts = st.lists(st.integers(0, len(data)), max_size=8).map(sorted)
    return cuts.map(lambda at: [data[a:b] for a, b in zip([0, *at], [*at, len(data)], strict=True)])


@given(st.one_of(st.binary(max_size=40), st.text(max_size=20).map(str.encode)).flatmap(pieces_of))
def test_deltas_add_up_however_bytes_are_cut(pieces: list[bytes]) -> None:
    detokenizer = Detokenizer(pieces.__getitem__)
    deltas = [detokenizer.push([index]) for index in range(len(pieces))]
    assert "".join(deltas) + detokenizer.finish() == b"".join(pieces).decode(errors="replace")


@given(st.text(max_size=20).map(str.encode).flatmap(pieces_of))
def test_every_delta_of_well_formed_text_is_whole_characters(pieces: list[bytes]) -> None:
    detokenizer = Detokenizer(pieces.__getitem__)
    deltas = [detokenizer.push([index]) for index in range(len(pieces))]
    text = b"".join(pieces).decode()
    assert "".join(deltas) == text
    assert detokenizer.finish() == ""


@given(st.lists(st.integers(0, VOCABULARY - 1), max_size=30), st.integers(1, 5))
def test_tokens_decode_as_the_library_decodes_them(token_ids: list[int], size: int) -> None:
    tokenizer = model_texts()["oracle"].tokenizer
    assert tokenizer is not None
    detokenizer = Detokenizer(tokenizer.token_bytes)
    text = "".join(detokenizer.push(token_ids[i : i + size]) for i in range(0, len(token_ids), size))
    assert text + detokenizer.finish() == LIBRARY.decode(token_ids, skip_special_tokens=True)


def test_a_character_split_over_tokens_comes_with_its_last_token() -> None:
    detokenizer = Detokenizer([b"\xf0\x9f", b"\xa4", b"\x96!"].__getitem__)
    assert [detokenizer.push([index]) for index in range(3)] == ["", "", "🤖!"]


def test_an_incomplete_last_character_is_replaced() -> None:
    detokenizer = Detokenizer([b"a\xe4\xbd"].__getitem__)
    assert detokenizer.push([0]) == "a"
    assert detokenizer.finish() == "�"
