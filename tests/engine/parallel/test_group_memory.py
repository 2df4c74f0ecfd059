import os

from engine.parallel.group_memory import HEADER_BYTES, GroupMemory, create_memory


def test_a_rank_that_closes_its_memory_has_ended() -> None:
    descriptor = create_memory(HEADER_BYTES)
    first, second = GroupMemory(descriptor, 0), GroupMemory(descriptor, 1)
    os.close(descriptor)
    assert not first.has_ended(1)
    view = memoryview(second.map)
    second.close()
    assert first.has_ended(1)
    view.release()
    first.close()


def test_a_rank_that_gave_up_has_not_ended() -> None:
    descriptor = create_memory(HEADER_BYTES)
    first, second = GroupMemory(descriptor, 0), GroupMemory(descriptor, 1)
    os.close(descriptor)
    assert not first.has_given_up(1)
    second.give_up()
    assert first.has_given_up(1) and not first.has_given_up(0) and not first.has_ended(1)
    second.close()
    assert first.has_ended(1)
    first.close()
