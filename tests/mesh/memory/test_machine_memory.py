"""Limits of control groups, in files as the kernel shows them."""

from pathlib import Path

import pytest

from mesh.memory.machine_memory import MachineMemory, group_limit


@pytest.mark.parametrize(
    ("limits", "own", "expected"),
    [
        ({"": "max"}, "0::/", None),
        ({"": "4096"}, "0::/", 4096),
        ({"a": "8192", "a/b": "max"}, "0::/a/b", 8192),
        ({"a": "4096", "a/b": "8192"}, "0::/a/b", 4096),
        ({}, "12:memory:/a", None),
    ],
    ids=["unlimited", "container", "parent", "parent below", "version 1"],
)
def test_the_lowest_limit_of_a_group_counts(
    tmp_path: Path, limits: dict[str, str], own: str, expected: int | None
) -> None:
    groups, own_group = tmp_path / "groups", tmp_path / "own"
    own_group.write_text(own + "\n")
    for group, limit in limits.items():
        (groups / group).mkdir(parents=True, exist_ok=True)
        (groups / group / "memory.max").write_text(limit + "\n")
    assert group_limit(own_group, groups) == expected


def test_a_machine_without_control_groups_has_no_limit(tmp_path: Path) -> None:
    assert group_limit(tmp_path / "absent", tmp_path) is None


def test_there_is_no_more_room_than_the_container_may_have() -> None:
    assert MachineMemory(4096, None).room == 4096
    assert MachineMemory(4096, 1024).room == 1024
    assert MachineMemory(1024, 4096).room == 1024
