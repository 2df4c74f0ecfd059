"""The ranks of a TP group that follow its first one, in benches and tests."""

import socket

from engine.parallel.peers import Peers
from engine.protocol.frames import FrameEncoder
from engine.protocol.messages import Stop
from engine.protocol.pulse import Pulse
from engine.rank.heartbeat import Heartbeat
from engine.rank.link import RankLink
from engine.rank.loop import FollowerLoop
from engine.runner.backend import ModelBackend
from engine.step.agreement import Agreement

# Longest step that the heartbeat allows; here it is not read.
STEP_SECONDS = 60.0


def follow(backend: ModelBackend, agreement: Agreement, peers: Peers) -> None:
    """Take steps with the other ranks until the first rank has stopped."""
    ours, theirs = socket.socketpair()
    pulse, _ = Pulse.create()
    with ours, theirs:
        ours.sendall(FrameEncoder().encode(Stop()))
        link = RankLink(theirs, peers.wakeup)
        FollowerLoop(link, backend, agreement, Heartbeat(pulse, None, STEP_SECONDS)).run()
