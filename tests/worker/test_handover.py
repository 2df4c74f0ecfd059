import os
import subprocess

import pytest

from worker import handover
from worker.handover import Handover, KeptRanks, RankHandle


@pytest.mark.parametrize("version, kept", [("1.0", True), ("1.1", False)])
def test_ranks_of_another_version_are_ended(version: str, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = subprocess.Popen(["sleep", "60"])
    ends = os.pipe()
    ranks = KeptRanks([RankHandle(rank.pid, *ends)])
    monkeypatch.setattr(handover, "own_version", lambda: "1.0")
    for name, value in Handover(ranks, ["a=1"], 1.5).leave().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(handover, "own_version", lambda: version)
    found = Handover.take()
    assert found is not None and (found.kept == ranks) == kept and found.former_settings == ["a=1"]
    if kept:
        ranks.end()
    # It has been waited for already.
    with pytest.raises(ProcessLookupError):
        os.kill(rank.pid, 0)
    rank.returncode = 0
