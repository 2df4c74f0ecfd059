from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.blocks import chain_hashes
from worker.chains import Chains, found_blocks


def hashes(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


def test_a_chain_goes_back_to_its_root() -> None:
    chains = Chains()
    chains.observe(hashes(1, 2), [b"", *hashes(1)], [])
    chains.observe(hashes(3, 4), hashes(2, 3), [])
    assert chains.ending_in(hashes(3, 4)) == [hashes(1, 2, 3, 4)]


def test_chains_that_branch_are_returned_one_by_one() -> None:
    chains = Chains()
    chains.observe(hashes(1, 2, 3), [b"", *hashes(1, 1)], [])
    assert chains.ending_in(hashes(1, 2, 3)) == [hashes(1, 2), hashes(1, 3)]


def test_a_chain_says_where_whole_draft_layers_end() -> None:
    chains = Chains()
    chains.observe(hashes(1, 2, 3), [b"", *hashes(1, 1)], [], draftless=hashes(2))
    assert [chains.drafts_end(chain) for chain in chains.ending_in(hashes(2, 3))] == [1, None]
    chains.observe(hashes(2), hashes(1), hashes(2))
    assert chains.drafts_end(hashes(1, 2)) is None


def test_a_chain_with_a_gap_is_left_out() -> None:
    chains = Chains()
    chains.observe(hashes(1, 2, 3), [b"", *hashes(1, 2)], [])
    chains.observe([], [], hashes(2))
    assert chains.ending_in(hashes(3)) == []
    assert chains.ending_in(hashes(1)) == [hashes(1)]


def test_a_block_that_left_and_came_again_is_there() -> None:
    chains = Chains()
    chains.observe(hashes(1), [b""], [])
    chains.observe(hashes(1), [b""], hashes(1))
    assert chains.ending_in(hashes(1)) == [hashes(1)]


def test_the_newest_chains_are_those_whose_end_came_last() -> None:
    chains = Chains()
    chains.observe(hashes(1, 2, 3), [b"", *hashes(1, 1)], [])
    chains.observe(hashes(4), hashes(2), [])
    assert chains.newest(5) == [hashes(1, 3), hashes(1, 2, 4)]
    assert chains.newest(1) == [hashes(1, 2, 4)]


prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=5), min_size=1, max_size=6)


@given(prompts)
def test_every_block_is_in_a_chain_of_its_prompt(shapes: list[list[int]]) -> None:
    chains, known = Chains(), set[bytes]()
    for shape in shapes:
        chain = chain_hashes([token for token in shape for _ in range(64)])
        new = [block for block in chain if block not in known]
        known.update(new)
        parents = [chain[chain.index(block) - 1] if chain.index(block) else b"" for block in new]
        chains.observe(new, parents, [])
        assert chains.ending_in(new) == ([chain] if new else [])


@dataclass
class Held:
    chains: set[bytes]
    hosted: set[bytes] = field(default_factory=set)


PROMPT = list(range(300))
HASHES = chain_hashes(PROMPT, b"salt")


@pytest.mark.parametrize(
    ("pool", "host", "found"),
    [
        ([0, 1], [], (2, 0)),
        ([0, 1, 2, 3], [], (4, 0)),
        ([0, 2], [], (1, 0)),
        ([1, 2, 3], [], (0, 0)),
        ([0], [1, 2], (1, 2)),
        ([0, 1], [0, 1, 2], (2, 1)),
        ([], [0, 1, 2, 3], (0, 4)),
        # The rank reads from host memory what follows its pool's part, and no further.
        ([0, 2], [1], (1, 1)),
        ([0], [2, 3], (1, 0)),
    ],
)
def test_host_memory_continues_the_prefix_in_a_ranks_pool(
    pool: list[int], host: list[int], found: tuple[int, int]
) -> None:
    ranks = [Held(set(), set()), Held({HASHES[each] for each in pool}, {HASHES[each] for each in host})]
    assert found_blocks(PROMPT, b"salt", ranks) == [(0, 0), found]


def test_a_prompt_shorter_than_a_block_is_cached_nowhere() -> None:
    assert found_blocks([1] * 63, b"", [Held({b"x"})]) == [(0, 0)]
