from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from mesh.rendezvous import rendezvous

ROOTS = [number.to_bytes(16, "big") for number in range(2000)]


def test_no_store_keeps_anything() -> None:
    assert rendezvous([], ROOTS[0]) is None


@given(st.sets(st.text(max_size=8), min_size=1, max_size=8), st.binary(min_size=16, max_size=16), st.randoms())
def test_the_order_in_which_stores_are_known_does_not_matter(stores: set[str], root: bytes, random: Random) -> None:
    known = sorted(stores)
    shuffled = list(known)
    random.shuffle(shuffled)
    assert rendezvous(known, root) == rendezvous(shuffled, root)


def test_chains_divide_evenly() -> None:
    shares = Counter(rendezvous(["a:1", "b:1", "c:1"], root) for root in ROOTS)
    assert all(550 < share < 800 for share in shares.values())


def test_a_store_that_leaves_moves_only_its_own_chains() -> None:
    before = {root: rendezvous(["a", "b", "c"], root) for root in ROOTS}
    after = {root: rendezvous(["a", "c"], root) for root in ROOTS}
    assert all(after[root] == store for root, store in before.items() if store != "b")
    assert set(after.values()) == {"a", "c"}
