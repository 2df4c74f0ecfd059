from kvstore.disk.content import Content
from kvstore.disk.reuse import Reuse
from kvstore.disk.slot_table import SlotTable
from kvstore.held_keys import HeldKeys
from kvstore.keys import whole_key
from kvstore.quotas import NO_QUOTAS, Quotas


def table_of(slots: int, quotas: Quotas = NO_QUOTAS) -> SlotTable:
    table = SlotTable(HeldKeys(), quotas)
    for slot in range(slots):
        table.found(slot, None)
    return table


def write(table: SlotTable, key: bytes, tenant: bytes = b"", parent: bytes | None = None) -> int | None:
    slot = table.begin_write(Content(key, tenant, parent))
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
    assert (table.known([b"a", b"c", b"b"]), table.has(b"b")) == ([b"a", b"c"], False)


def test_a_chain_gives_way_from_its_end() -> None:
    table = table_of(4)
    for key, parent in ((b"a", None), (b"b", b"a"), (b"c", b"b"), (b"d", None)):
        write(table, key, parent=parent)
    # Each of them was used before the last; without the first, the others would never be found.
    for number in range(1, 4):
        write(table, b"new %d" % number)
        assert table.known([b"a", b"b", b"c"]) == [b"a", b"b", b"c"][: 3 - number]
    assert table.has(b"d")


def test_what_is_being_written_keeps_the_block_before_it() -> None:
    table = table_of(2)
    write(table, b"a")
    slot = table.begin_write(Content(b"b", parent=b"a"))
    assert slot is not None and table.begin_write(Content(b"c")) is None
    table.end_write(b"b", slot, written=False)
    assert write(table, b"c") == slot


def test_no_block_makes_room_for_the_one_that_follows_it() -> None:
    table = table_of(1)
    slot = write(table, b"a")
    assert table.begin_write(Content(b"b", parent=b"a")) is None
    assert write(table, b"c") == slot


def test_a_block_with_a_drafted_twin_goes_before_its_children() -> None:
    key, later = bytes(24), bytes([1]) * 24
    table = table_of(3)
    without_drafts = write(table, key)
    write(table, whole_key(key))
    write(table, later, parent=key)
    assert write(table, b"new") == without_drafts
    assert table.known([key, later]) == [whole_key(key), later]
    assert write(table, b"newer") is not None
    assert table.known([key, later]) == [whole_key(key)]


def test_chains_of_a_reopened_file_are_evicted_from_their_ends() -> None:
    table = SlotTable(HeldKeys())
    # Slots are found in any order.
    for slot, number in enumerate((2, 0, 1)):
        table.found(slot, Content(b"%d" % number, parent=b"%d" % (number - 1) if number else None))
    write(table, b"new")
    assert table.known([b"0", b"1", b"2"]) == [b"0", b"1"]


def test_a_slot_that_is_being_read_is_not_given_away() -> None:
    table = table_of(1)
    assert write(table, b"a") == 0
    table.begin_read(b"a")
    assert table.begin_write(Content(b"b")) is None
    table.end_read(b"a")
    assert table.begin_write(Content(b"b")) == 0


def test_a_tenant_at_its_quota_evicts_its_least_recently_read() -> None:
    table = table_of(6, Quotas(each=2))
    assert write(table, b"other", b"quiet") is not None
    first, second = write(table, b"a", b"busy"), write(table, b"b", b"busy")
    table.begin_read(b"a")
    assert write(table, b"c", b"busy") == second
    # All that is left to give up is being read.
    table.begin_read(b"c")
    assert table.begin_write(Content(b"d", b"busy")) is None
    table.end_read(b"c")
    assert table.begin_write(Content(b"d", b"busy")) == second
    # What is being written counts too.
    assert table.tenant_blocks == {b"quiet": 1, b"busy": 2}
    table.end_write(b"d", second or 0, written=False)
    assert (table.tenant_blocks, table.known([b"a"])) == ({b"quiet": 1, b"busy": 1}, [b"a"])
    assert table.begin_read(b"a") == first
    assert table.evicted_by_quota == {b"busy": 2}


def test_a_file_keeps_only_the_quota_of_a_tenant() -> None:
    table = SlotTable(HeldKeys(), Quotas(each=2))
    for slot, key in enumerate([b"a", b"b", b"c"]):
        table.found(slot, Content(key, b"busy"))
    table.found(3, Content(b"d", b"quiet"))
    assert table.tenant_blocks == {b"busy": 2, b"quiet": 1}
    assert table.tenant_of(b"a") == b"busy"
    assert write(table, b"e", b"quiet") == 2


def test_unwritten_and_damaged_blocks_are_not_found() -> None:
    table = table_of(1)
    assert table.begin_write(Content(b"a")) == 0
    assert table.known([b"a"]) == []
    table.end_write(b"a", 0, written=False)
    assert write(table, b"b") == 0
    assert table.begin_read(b"b") == 0
    table.end_read(b"b", damaged=True)
    assert table.begin_read(b"b") is None
    assert write(table, b"c") == 0


def test_of_two_slots_with_one_key_one_is_blank() -> None:
    table = SlotTable(HeldKeys())
    table.found(0, Content(b"a"))
    table.found(1, Content(b"a"))
    assert (len(table), write(table, b"b")) == (1, 1)


def test_a_key_is_gone_once_no_tier_has_it() -> None:
    held = HeldKeys()
    table = SlotTable(held)
    held.gained(b"a")
    table.found(0, Content(b"a"))
    assert held.drain_changes().stored == [b"a"]
    held.lost(b"a")
    assert held.drain_changes().removed == []
    assert write(table, b"b") == 0
    changes = held.drain_changes()
    assert (changes.stored, changes.removed) == ([b"b"], [b"a"])


def test_a_block_is_worth_writing_after_another_use() -> None:
    reuse = Reuse(least_uses=1, remembered=2)
    assert reuse.stored([b"a"]) == []
    assert reuse.used([b"a"]) == [b"a"]
    assert reuse.stored([b"b", b"c"]) == []
    # Offered again while it is remembered; the other has been forgotten.
    assert reuse.stored([b"b", b"a"]) == [b"b"]
    assert Reuse(least_uses=0, remembered=2).stored([b"a"]) == [b"a"]
