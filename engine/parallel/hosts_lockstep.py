"""Agreement of ranks on several hosts: first within each, then the hosts' first ranks among one another."""

import msgspec
from msgspec.structs import astuple

from engine.agreement import Agreement, agreed
from engine.batch import StepShape
from engine.parallel.host_line import HostLine
from engine.parallel.lockstep import Lockstep
from engine.parallel.peers import Peers


class HostsLockstep:
    """engine.agreement.Agreement."""

    def __init__(self, within: Lockstep, line: HostLine | None) -> None:
        """within: this host; line: to the others, on its first rank alone."""
        self._within = within
        self._line = line
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(StepShape)

    @property
    def due(self) -> bool:
        return self._within.due or (self._line is not None and self._line.due)

    def agree(self, proposal: StepShape) -> StepShape:
        """Raises RankLost."""
        shape = self._within.agree(proposal)
        if self._line is not None:
            others = self._line.exchange(self._encoder.encode(shape))
            shape = agreed(shape, (astuple(self._decoder.decode(other)) for other in others))
        return self._within.of_first(shape)


def agreement_of(peers: Peers) -> Agreement:
    """How this rank agrees with all others of its worker."""
    within = Lockstep(peers.steps, peers.wake)
    return within if peers.in_worker.layout.hosts == 1 else HostsLockstep(within, peers.line)
