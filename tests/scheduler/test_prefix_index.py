from hypothesis import given
from hypothesis import strategies as st

from scheduler.prefix_index import PrefixIndex, numbers

holdings = st.dictionaries(st.sampled_from([0, 1, 63, 64, 1023]), st.sets(st.integers(0, 12)))


def hashes(blocks: set[int] | list[int]) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in blocks]


def prefix(held: set[int], chain: list[int]) -> int:
    return next((position for position, number in enumerate(chain) if number not in held), len(chain))


@given(
    holdings, st.dictionaries(st.sampled_from([0, 63, 64]), st.sets(st.integers(0, 12))), st.lists(st.integers(0, 12))
)
def test_every_workers_prefix_is_that_of_its_own_walk(
    stored: dict[int, set[int]], removed: dict[int, set[int]], chain: list[int]
) -> None:
    index = PrefixIndex()
    for worker, held in stored.items():
        for block_hash in hashes(held):
            index.add(worker, block_hash)
    for worker, gone in removed.items():
        index.remove(worker, hashes(gone))
    left = {worker: blocks - removed.get(worker, set()) for worker, blocks in stored.items()}
    holders = index.holders(hashes(chain))
    assert {each: holders.prefix(each) for each in left} == {each: prefix(held, chain) for each, held in left.items()}


def test_a_worker_that_is_not_in_the_index_holds_nothing() -> None:
    index = PrefixIndex()
    for worker in (1, 2):
        index.add(worker, b"a")
    assert [index.holders([b"a"]).prefix(worker) for worker in (2, 3)] == [1, 0]


@given(holdings, st.sets(st.sampled_from([0, 1, 63, 64, 1023])), st.lists(st.integers(0, 12)))
def test_those_of_the_asked_that_hold_most_come_first(
    stored: dict[int, set[int]], asked: set[int], chain: list[int]
) -> None:
    index = PrefixIndex()
    for worker, held in stored.items():
        for block_hash in hashes(held):
            index.add(worker, block_hash)
    lengths = {worker: prefix(stored.get(worker, set()), chain) for worker in asked}
    groups = index.holders(hashes(chain)).groups(sum(1 << worker for worker in asked))
    expected = [
        {worker for worker in asked if lengths[worker] == length}
        for length in sorted({length for length in lengths.values() if length}, reverse=True)
    ]
    assert [set(numbers(group)) for group in groups] == expected
