"""How many connections fit into the files that a process may open."""

import resource

import pytest

from mesh.processes.open_files import MOST_FILES, OWN_FILES, connections, raise_limit

NO_LIMIT = resource.RLIM_INFINITY


class Limits:
    """The system's limits of open files: what a process is allowed, and what it may raise that to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allowed: int, permitted: int) -> None:
        self.now = (allowed, permitted)
        monkeypatch.setattr(resource, "getrlimit", lambda kind: self.now)
        monkeypatch.setattr(resource, "setrlimit", self._set)

    def _set(self, kind: int, limits: tuple[int, int]) -> None:
        assert limits[1] == self.now[1]
        self.now = limits


@pytest.mark.parametrize("files", [1, 40, 60, 1024, 20_000, NO_LIMIT])
def test_all_connections_fit_into_the_files(monkeypatch: pytest.MonkeyPatch, files: int) -> None:
    Limits(monkeypatch, files, files)
    taken = [connections(eighths) for eighths in (6, 1, 1)]
    assert min(taken) >= 1
    if files == NO_LIMIT or files > OWN_FILES + 8:
        assert sum(taken) + OWN_FILES <= (MOST_FILES if files == NO_LIMIT else files)


@pytest.mark.parametrize(
    ("allowed", "permitted", "raised"),
    [
        (1024, 4096, 4096),
        (1024, 1_048_576, MOST_FILES),
        (1024, NO_LIMIT, MOST_FILES),
        (100_000, 1_048_576, 100_000),
        (NO_LIMIT, NO_LIMIT, NO_LIMIT),
        (60, 60, 60),
    ],
)
def test_the_limit_is_raised_as_far_as_permitted(
    monkeypatch: pytest.MonkeyPatch, allowed: int, permitted: int, raised: int
) -> None:
    limits = Limits(monkeypatch, allowed, permitted)
    raise_limit()
    assert limits.now == (raised, permitted)
