"""Tokens of blocks, learned from requests."""

import struct
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from mesh.blocks import chain_hashes, root_hash
from mesh.domain.requests import TokenRequest
from mesh.domain.sampling import Sampling, StopConditions
from mesh.domain.sparse_prefill import SparsePrefill
from worker.events.block_tokens import BlockTokens


def request(token_ids: list[int], **changes: Any) -> TokenRequest:
    return TokenRequest("r", token_ids, Sampling(), StopConditions(max_tokens=10), **changes)


def told(tokens: BlockTokens, content: bytes) -> list[int] | None:
    text = tokens.take(content)
    return None if text is None else list(struct.unpack("<64I", text.tokens))


@given(
    prompt=st.integers(1, 200),
    steps=st.lists(st.integers(1, 70), max_size=6),
    salt=st.binary(max_size=4),
    sparse=st.none() | st.just(SparsePrefill(64, 0.9)),
    repeated=st.integers(0, 3),
)
def test_every_full_block_of_a_request_has_its_tokens(
    prompt: int, steps: list[int], salt: bytes, sparse: SparsePrefill | None, repeated: int
) -> None:
    tokens, token_ids = BlockTokens(1000), list(range(prompt + sum(steps)))
    tokens.submitted(1, request(token_ids[:prompt], cache_salt=salt, sparse=sparse))
    position = prompt
    for step in steps:
        # A report may begin with tokens that were reported before.
        begin = max(position - repeated, 0)
        tokens.generated(1, begin, token_ids[begin : position + step])
        position += step
    for index, content in enumerate(chain_hashes(token_ids, salt, sparse)):
        text = tokens.take(content)
        assert text is not None and text.root == root_hash(salt)
        assert list(struct.unpack("<64I", text.tokens)) == token_ids[64 * index : 64 * index + 64]
        assert tokens.take(content) is None


def test_a_first_token_from_elsewhere_counts() -> None:
    tokens, token_ids = BlockTokens(10), list(range(128))
    tokens.submitted(1, request(token_ids[:100]))
    tokens.followed(1, 100)
    tokens.generated(1, 101, token_ids[101:])
    assert told(tokens, chain_hashes(token_ids)[1]) == token_ids[64:]


def test_tokens_after_a_gap_or_an_end_tell_nothing() -> None:
    tokens, token_ids = BlockTokens(10), list(range(192))
    tokens.submitted(1, request(token_ids[:70]))
    tokens.generated(1, 71, token_ids[71:])
    tokens.ended(1)
    tokens.generated(1, 70, token_ids[70:])
    hashes = chain_hashes(token_ids)
    assert told(tokens, hashes[0]) == token_ids[:64]
    assert [told(tokens, content) for content in hashes[1:]] == [None, None]


def test_only_the_newest_blocks_are_remembered() -> None:
    tokens, token_ids = BlockTokens(2), list(range(64 * 5))
    tokens.submitted(1, request(token_ids))
    assert [told(tokens, content) is not None for content in chain_hashes(token_ids)] == [False] * 3 + [True] * 2
