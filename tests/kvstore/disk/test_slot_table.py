from kvstore.disk.reuse import Reuse
from kvstore.disk.slot_table import SlotTable
from kvstore.held_keys import HeldKeys


def table_of(slots: int) -> SlotTable:
    table = SlotTable(HeldKeys())
    for slot in range(slots):
        table.found(slot, None)
    return table


def write(table: SlotTable, key: bytes) -> int | None:
    slot = table.begin_write(key)
    if slot is not None:
        table.end_write(key, slot, written=True)
    return slot


def test_the_least_recently_read_gives_way() -> None:
    table = table_of(2)
    first, second = write(table, b"a"), write(table, b"b")
    assert {first, second} == {0, 1}
    assert table.begin_read(b"a") == first
    table.end_read(b"a")
    assert write(table, b"c") == second
    assert (table.known([b"a", b"c", b"b"]), table.has(b"b")) == (2, False)


def test_a_slot_that_is_being_read_is_not_given_away() -> None:
    table = table_of(1)
    assert write(table, b"a") == 0
    table.begin_read(b"a")
    assert table.begin_write(b"b") is None
    table.end_read(b"a")
    assert table.begin_write(b"b") == 0


def test_what_could_not_be_written_or_is_damaged_is_not_there() -> None:
    table = table_of(1)
    assert table.begin_write(b"a") == 0
    assert table.known([b"a"]) == 0
    table.end_write(b"a", 0, written=False)
    assert write(table, b"b") == 0
    assert table.begin_read(b"b") == 0
    table.end_read(b"b", damaged=True)
    assert table.begin_read(b"b") is None
    assert write(table, b"c") == 0


def test_of_two_slots_with_one_key_one_is_blank() -> None:
    table = SlotTable(HeldKeys())
    table.found(0, b"a")
    table.found(1, b"a")
    assert (len(table), write(table, b"b")) == (1, 1)


def test_a_key_is_gone_once_no_tier_has_it() -> None:
    held = HeldKeys()
    table = SlotTable(held)
    held.gained(b"a")
    table.found(0, b"a")
    assert held.drain_changes().stored == [b"a"]
    held.lost(b"a")
    assert held.drain_changes().removed == []
    assert write(table, b"b") == 0
    changes = held.drain_changes()
    assert (changes.stored, changes.removed) == ([b"b"], [b"a"])


def test_a_block_is_worth_a_write_once_it_was_used_again() -> None:
    reuse = Reuse(least_uses=1, remembered=2)
    assert reuse.stored([b"a"]) == []
    assert reuse.used([b"a"]) == [b"a"]
    assert reuse.stored([b"b", b"c"]) == []
    # Offered again while it is remembered; the other has been forgotten.
    assert reuse.stored([b"b", b"a"]) == [b"b"]
    assert Reuse(least_uses=0, remembered=2).stored([b"a"]) == [b"a"]
