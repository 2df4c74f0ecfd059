import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.disk.block_file import ALIGNMENT, BlockFile, DamagedBlock, TooSmall
from kvstore.disk.content import Content
from kvstore.store_memory import StoreMemory
from transfer.ticket import BlockMac

LAYERS, BLOCK_BYTES = 3, 9000
# A header's page, and three for the block.
SLOT_BYTES = 4 * ALIGNMENT
MAC = BlockMac("decode-0", bytes(16), bytes(range(48)))


def open_file(directory: Path, slots: int = 4, **changes: int) -> BlockFile:
    shape = {"layers": LAYERS, "block_bytes": BLOCK_BYTES, **changes}
    return BlockFile(directory / "store.kv", size_bytes=ALIGNMENT + slots * SLOT_BYTES, threads=2, **shape)


def block_of(seed: int) -> memoryview:
    return np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, np.uint8).data


def key_of(number: int) -> bytes:
    return bytes([number]) * 24


def read(file: BlockFile, slot: int, key: bytes) -> tuple[bytes, BlockMac | None]:
    into = bytearray(BLOCK_BYTES)
    mac = file.read(slot, key, memoryview(into))
    return bytes(into), mac


def test_what_is_written_is_read_back_with_its_macs(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    assert file.slots == 4
    for slot in range(4):
        file.write(slot, Content(key_of(slot)), block_of(slot), MAC if slot % 2 else None)
    for slot in range(4):
        assert read(file, slot, key_of(slot)) == (bytes(block_of(slot)), MAC if slot % 2 else None)
    file.close()


def test_blocks_go_from_and_to_a_stores_memory(tmp_path: Path) -> None:
    piece_bytes = ALIGNMENT // 2
    memory = StoreMemory(layers=6, blocks=4, piece_bytes=piece_bytes)
    drawn = np.random.default_rng(0).integers(0, 256, (6, 2, piece_bytes), np.uint8)
    memory.block(1)[:] = drawn[:, 0].tobytes()
    memory.block(3)[:] = drawn[:, 1].tobytes()
    file = open_file(tmp_path, slots=8, block_bytes=6 * piece_bytes)
    file.write(0, Content(key_of(0)), memory.block(1), MAC)
    file.write(1, Content(key_of(1)), memory.block(3), MAC)
    for block, number in ((0, 0), (2, 1)):
        file.read(number, key_of(number), memory.block(block))
        assert memory.block(block) == drawn[:, number].tobytes()
    assert memory.block(1) == drawn[:, 0].tobytes()
    file.close()


def test_a_reopened_file_reports_its_content(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    first, second = Content(key_of(1)), Content(key_of(2), b"tenant", key_of(1))
    file.write(1, first, block_of(1), None)
    file.write(2, second, block_of(2), MAC)
    file.close()
    again = open_file(tmp_path)
    assert [again.content_of(slot) for slot in range(4)] == [None, first, second, None]
    assert read(again, 2, key_of(2)) == (bytes(block_of(2)), MAC)
    again.close()


@pytest.mark.parametrize("changes", [{"layers": 4}, {"block_bytes": 9001}])
def test_a_file_of_blocks_of_another_shape_is_begun_anew(tmp_path: Path, changes: dict[str, int]) -> None:
    file = open_file(tmp_path)
    file.write(0, Content(key_of(0)), block_of(0), MAC)
    file.close()
    for shape in (changes, {}):
        other = open_file(tmp_path, **shape)
        assert other.content_of(0) is None
        other.close()


def test_a_file_with_no_room_for_a_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TooSmall, match=f"{SLOT_BYTES} bytes"):
        open_file(tmp_path, slots=0)


def test_a_file_that_does_not_fit_keeps_its_old_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate_what_there_is(file: int, offset: int, size_bytes: int) -> None:
        os.ftruncate(file, size_bytes // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    file = open_file(tmp_path, slots=2)
    file.write(1, Content(key_of(1)), block_of(1), MAC)
    file.close()
    monkeypatch.setattr(os, "posix_fallocate", allocate_what_there_is)
    with pytest.raises(OSError, match="No space"):
        open_file(tmp_path, slots=20)
    monkeypatch.undo()
    assert (tmp_path / "store.kv").stat().st_size == ALIGNMENT + 2 * SLOT_BYTES
    again = open_file(tmp_path, slots=2)
    assert again.content_of(1) == Content(key_of(1))
    again.close()


def test_two_processes_do_not_share_a_file(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    with pytest.raises(BlockingIOError):
        open_file(tmp_path)
    file.close()
    open_file(tmp_path).close()


def test_a_block_is_not_read_as_another(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    file.write(0, Content(key_of(0)), block_of(0), MAC)
    with pytest.raises(DamagedBlock):
        read(file, 0, key_of(1))
    with pytest.raises(DamagedBlock):
        read(file, 1, key_of(1))
    file.close()


def test_a_write_that_was_cut_short_leaves_no_block(tmp_path: Path) -> None:
    """If a slot had another block before, each of its pages may be the new one or the old one."""
    for torn in range(1, 15):
        file = open_file(tmp_path)
        file.write(1, Content(key_of(1)), block_of(1), MAC)
        old = (tmp_path / "store.kv").read_bytes()
        file.write(1, Content(key_of(2)), block_of(2), MAC)
        file.close()
        raw = os.open(tmp_path / "store.kv", os.O_RDWR)
        for page in range(4):
            if torn >> page & 1:
                offset = ALIGNMENT + SLOT_BYTES + page * ALIGNMENT
                os.pwrite(raw, old[offset : offset + ALIGNMENT], offset)
        os.close(raw)
        again = open_file(tmp_path)
        for key in (key_of(1), key_of(2)):
            with pytest.raises(DamagedBlock):
                read(again, 1, key)
        again.close()


@given(byte=st.integers(0, BLOCK_BYTES - 1) | st.integers(-ALIGNMENT, -ALIGNMENT + 150), bit=st.integers(0, 7))
def test_a_bit_that_flips_on_the_medium_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, byte: int, bit: int
) -> None:
    directory = tmp_path_factory.mktemp("disk")
    file = open_file(directory, slots=1)
    file.write(0, Content(key_of(0)), block_of(0), MAC)
    file.close()
    raw, offset = os.open(directory / "store.kv", os.O_RDWR), 2 * ALIGNMENT + byte
    before = os.pread(raw, 1, offset)
    os.pwrite(raw, bytes([before[0] ^ 1 << bit]), offset)
    os.close(raw)
    again = open_file(directory, slots=1)
    with pytest.raises(DamagedBlock):
        read(again, 0, key_of(0))
    again.close()
    (directory / "store.kv").unlink()
