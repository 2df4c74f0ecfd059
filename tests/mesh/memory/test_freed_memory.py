import asyncio
import errno
from collections.abc import Sequence

import pytest

from mesh.memory import freed_memory
from mesh.memory.freed_memory import GROWTH_BYTES, LOOK_SECONDS, release_grown_memory

MB = 1 << 20


async def pauses_of(monkeypatch: pytest.MonkeyPatch, resident: Sequence[int]) -> list[float]:
    """The pauses between looks. resident: what the process holds at the start and then whenever it is asked; each
    release takes the next value too.
    """
    left, pauses = iter([each * MB for each in resident]), list[float]()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(freed_memory, "resident_bytes", lambda: next(left))
    monkeypatch.setattr(freed_memory, "release_freed_memory", lambda: None)
    monkeypatch.setattr(asyncio, "sleep", sleep)
    # A coroutine that runs out of values ends with this error.
    with pytest.raises(RuntimeError, match="StopIteration"):
        await release_grown_memory()
    return [pause / LOOK_SECONDS for pause in pauses]


@pytest.mark.parametrize(
    ("resident", "pauses"),
    [
        ([100, 110, 120], [1, 1, 1]),
        # Looks that find growth ask again after they have released memory.
        ([100, 500, 120, 500, 130], [1, 1, 1]),
        ([100, 500, 490, 500, 499, 500, 500, 500, 110, 120], [1, 2, 4, 8, 1, 1]),
    ],
    ids=["no growth", "growth that is freed", "growth that stays a while"],
)
async def test_memory_is_released_whenever_the_process_has_grown(
    monkeypatch: pytest.MonkeyPatch, resident: Sequence[int], pauses: Sequence[float]
) -> None:
    assert GROWTH_BYTES == 64 * MB
    assert await pauses_of(monkeypatch, resident) == pauses


async def test_a_look_without_a_free_file_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([100 * MB, None, 500 * MB, 110 * MB])

    def resident() -> int:
        found = next(looks)
        if found is None:
            raise OSError(errno.EMFILE, "Too many open files")
        return found

    released: list[bool] = []
    monkeypatch.setattr(freed_memory, "resident_bytes", resident)
    monkeypatch.setattr(freed_memory, "release_freed_memory", lambda: released.append(True))
    monkeypatch.setattr(freed_memory, "LOOK_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await release_grown_memory()
    assert released == [True]
