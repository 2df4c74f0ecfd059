from hypothesis import given
from hypothesis import strategies as st

from transfer.slots import Direction, SlotPool

actions = st.lists(
    st.tuples(st.sampled_from(["sending", "receiving", "quarantine", "release"]), st.integers(0, 100)), max_size=60
)


@given(st.integers(2, 6), actions)
def test_a_slot_has_one_owner_and_each_comes_back(count: int, steps: list[tuple[str, int]]) -> None:
    pool = SlotPool([None] * count)
    held: list[int] = []
    quarantined: list[int] = []
    for action, choice in steps:
        if action in ("sending", "receiving"):
            slot = pool.acquire(Direction(action))
            if slot is not None:
                assert slot not in held and slot not in quarantined
                held.append(slot)
        elif action == "quarantine" and held:
            slot = held.pop(choice % len(held))
            pool.quarantine(slot)
            quarantined.append(slot)
        elif action == "release" and held + quarantined:
            slot = (held + quarantined)[choice % len(held + quarantined)]
            pool.release(slot)
            (held if slot in held else quarantined).remove(slot)
        assert pool.free == count - len(held) - len(quarantined)
        assert pool.quarantined == len(quarantined)
    for slot in held + quarantined:
        pool.release(slot)
    assert pool.free == pool.total == count


def test_neither_direction_takes_the_last_slot() -> None:
    pool = SlotPool([None] * 3)
    assert pool.acquire(Direction.SENDING) is not None
    assert pool.acquire(Direction.SENDING) is not None
    assert pool.acquire(Direction.SENDING) is None
    assert pool.acquire(Direction.RECEIVING) is not None


def test_a_quarantined_slot_still_counts_for_its_direction() -> None:
    pool = SlotPool([None] * 2)
    slot = pool.acquire(Direction.SENDING)
    assert slot is not None
    pool.quarantine(slot)
    assert pool.acquire(Direction.SENDING) is None
    pool.release(slot)
    assert pool.acquire(Direction.SENDING) is not None
