"""Exit statuses are told in words."""

import pytest

from mesh.processes.exit_status import describe_status


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, "status 0"), (2, "status 2"), (-9, "signal SIGKILL"), (-34, "signal SIGRTMIN"), (-40, "signal 40")],
)
def test_signals_are_named_where_they_have_names(status: int, words: str) -> None:
    assert describe_status(status) == words
