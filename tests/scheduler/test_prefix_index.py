from hypothesis import given
from hypothesis import strategies as st

from scheduler.prefix_index import PrefixIndex

holdings = st.dictionaries(st.sampled_from([0, 1, 63, 64, 1023]), st.sets(st.integers(0, 12)))


def hashes(numbers: set[int] | list[int]) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


def prefix(held: set[int], chain: list[int]) -> int:
    return next((position for position, number in enumerate(chain) if number not in held), len(chain))


@given(
    holdings, st.dictionaries(st.sampled_from([0, 63, 64]), st.sets(st.integers(0, 12))), st.lists(st.integers(0, 12))
)
def test_every_worker_has_the_prefix_that_a_walk_of_its_own_finds(
    stored: dict[int, set[int]], removed: dict[int, set[int]], chain: list[int]
) -> None:
    index = PrefixIndex()
    for worker, numbers in stored.items():
        for block_hash in hashes(numbers):
            index.add(worker, block_hash)
    for worker, numbers in removed.items():
        index.remove(worker, hashes(numbers))
    held = {worker: numbers - removed.get(worker, set()) for worker, numbers in stored.items()}
    found = index.holders(hashes(chain)).prefixes(held)
    assert found == {worker: prefix(numbers, chain) for worker, numbers in held.items()}


def test_workers_that_are_not_asked_about_are_not_answered_for() -> None:
    index = PrefixIndex()
    for worker in (1, 2):
        index.add(worker, b"a")
    assert index.holders([b"a"]).prefixes([2, 3]) == {2: 1, 3: 0}


@given(holdings, st.sets(st.sampled_from([0, 1, 63, 64, 1023])), st.lists(st.integers(0, 12)), st.integers(0, 4))
def test_the_longest_are_those_of_the_asked_that_hold_most(
    stored: dict[int, set[int]], asked: set[int], chain: list[int], count: int
) -> None:
    index = PrefixIndex()
    for worker, numbers in stored.items():
        for block_hash in hashes(numbers):
            index.add(worker, block_hash)
    held = {worker: prefix(stored.get(worker, set()), chain) for worker in asked}
    best_first = sorted((worker for worker in held if held[worker]), key=lambda worker: (-held[worker], worker))
    members = sum(1 << worker for worker in asked)
    assert index.holders(hashes(chain)).longest(members, count) == best_first[:count]
