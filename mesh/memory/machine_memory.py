"""How much memory a process could take: what its machine has left, and what its container may have."""

from dataclasses import dataclass
from pathlib import Path

import psutil

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class MachineMemory:
    """Memory in bytes: what is available on the machine, and the container's limit, None if it has none."""

    available: int
    limit: int | None

    @property
    def room(self) -> int:
        """The smaller of both."""
        return self.available if self.limit is None else min(self.available, self.limit)


def machine_memory() -> MachineMemory:
    """What this process could take now."""
    return MachineMemory(psutil.virtual_memory().available, group_limit(_OWN_GROUP, _CONTROL_GROUPS))


def group_limit(own_group: Path, groups: Path) -> int | None:
    """The lowest memory limit of this process's control group (version 2) and its parents.

    own_group: a file as /proc/self/cgroup; groups: where the groups are mounted.
    """
    try:
        lines = own_group.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    path = next((line[3:] for line in lines if line.startswith("0::")), "/").strip("/")
    own = groups / path
    found = [_limit(each / "memory.max") for each in (own, *own.parents) if each.is_relative_to(groups)]
    return min((limit for limit in found if limit is not None), default=None)


def _limit(file: Path) -> int | None:
    try:
        text = file.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
