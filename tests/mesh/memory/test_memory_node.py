"""Memory of a node: which the kernel names, in files as it shows them, and what it makes of the wish."""

import errno
from pathlib import Path

import numpy as np
import pytest

from mesh.memory.huge_pages import huge_memory
from mesh.memory.memory_node import node_of_device, prefer_node

NUMA_MAPS = Path("/proc/self/numa_maps")


@pytest.mark.parametrize(
    ("shown", "expected"),
    [("1\n", 1), ("0\n", 0), ("-1\n", None), ("", None), (None, None)],
    ids=["second", "first", "one node", "empty", "no file"],
)
def test_a_devices_node_is_what_the_kernel_shows(tmp_path: Path, shown: str | None, expected: int | None) -> None:
    device = tmp_path / "0000:1b:00.0"
    device.mkdir()
    if shown is not None:
        (device / "numa_node").write_text(shown)
    assert node_of_device("0000:1B:00.0", tmp_path) == expected


def test_an_unknown_device_has_no_node(tmp_path: Path) -> None:
    assert node_of_device("0000:1b:00.0", tmp_path / "absent") is None


def prefer(memory: np.ndarray[tuple[int], np.dtype[np.uint8]], node: int) -> None:
    try:
        prefer_node(memory.ctypes.data, len(memory), node)
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS):
            pytest.skip(f"mbind is not allowed here: {error}")
        raise


@pytest.mark.skipif(not NUMA_MAPS.exists(), reason="needs a kernel that knows nodes")
def test_memory_prefers_the_node_that_it_was_given() -> None:
    memory = np.frombuffer(huge_memory(4 << 20), np.uint8)
    prefer(memory, 0)
    (line,) = [each for each in NUMA_MAPS.read_text().splitlines() if each.startswith(f"{memory.ctypes.data:x} ")]
    assert line.split()[1] in ("prefer:0", "prefer=relative:0")


@pytest.mark.skipif(not NUMA_MAPS.exists(), reason="needs a kernel that knows nodes")
@pytest.mark.parametrize("node", [63, 500])
def test_a_node_that_is_not_there_is_an_error(node: int) -> None:
    with pytest.raises(OSError):
        prefer(np.frombuffer(huge_memory(1 << 20), np.uint8), node)
