from hypothesis import given
from hypothesis import strategies as st

from mesh.blocks import BLOCK_TOKENS, HASH_BYTES, block_hash, chain_hashes, root_hash

tokens = st.integers(0, 2**32 - 1)


def prompt(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


def test_hashes_are_the_ones_that_other_releases_computed() -> None:
    [first, second] = chain_hashes(prompt(2 * BLOCK_TOKENS), b"tenant")
    assert (first.hex(), second.hex()) == ("c32ca130c391fd8af08b2c6d9814c6e5", "caf7bbb63e4fb683eb2e1c292e441daf")


def test_a_partial_last_block_has_no_hash() -> None:
    lengths = [0, 1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 3 * BLOCK_TOKENS]
    assert [len(chain_hashes(prompt(length))) for length in lengths] == [0, 0, 0, 1, 1, 3]


def test_a_chain_starts_at_the_root_of_its_salt() -> None:
    assert chain_hashes(prompt(BLOCK_TOKENS), b"s") == [block_hash(root_hash(b"s"), prompt(BLOCK_TOKENS))]


def test_tenants_with_different_salts_share_no_block() -> None:
    ids = prompt(4 * BLOCK_TOKENS)
    assert not set(chain_hashes(ids, b"a")) & set(chain_hashes(ids, b"b"))


def test_equal_blocks_after_different_prefixes_have_different_hashes() -> None:
    same = prompt(BLOCK_TOKENS)
    assert chain_hashes(prompt(BLOCK_TOKENS, 1) + same)[1] != chain_hashes(prompt(BLOCK_TOKENS, 2) + same)[1]


@given(st.lists(tokens, min_size=BLOCK_TOKENS, max_size=4 * BLOCK_TOKENS), st.data())
def test_a_changed_token_changes_all_hashes_from_it_on(ids: list[int], data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(ids) - 1))
    other = [*ids[:position], ids[position] ^ 1, *ids[position + 1 :]]
    block = position // BLOCK_TOKENS
    before, after = chain_hashes(ids), chain_hashes(other)
    assert before[:block] == after[:block]
    assert not set(before[block:]) & set(after[block:])
    assert all(len(each) == HASH_BYTES for each in before)
