"""A rank on another host, as the first host's service sees it."""

import os

import pytest

from engine.protocol.pulse import LoopProgress, Pulse
from worker.hosts.remote_rank import SILENT_SECONDS, RemoteRank


@pytest.mark.parametrize("silent", [False, True])
async def test_a_rank_is_killed_while_its_host_speaks(silent: bool) -> None:
    now, killed = 0.0, list[float]()
    rank = RemoteRank(lambda _: None, lambda: killed.append(now), lambda: now)
    now = 10.0
    rank.progressed(LoopProgress(1, 0, 0, 1000))
    now += SILENT_SECONDS if silent else 0.1
    rank.kill()
    # A silent host reads this once it is reached again: by then it keeps the rank for another group.
    assert killed == ([] if silent else [now])
    rank.ended(-9)
    with pytest.raises(ProcessLookupError):
        rank.kill()


async def test_a_host_that_waited_for_others_is_not_silent() -> None:
    now, killed = 0.0, list[float]()
    rank = RemoteRank(lambda _: None, lambda: killed.append(now), lambda: now)
    # The worker forms long after the host has joined, and stops before the host has said how its rank loads.
    now = 60.0
    pulse, descriptor = Pulse.create()
    rank.shows_progress_by(pulse)
    rank.kill()
    assert killed == [now]
    os.close(descriptor)
