"""Agreement of ranks on several hosts: first within each, then the hosts' first ranks among one another."""

from functools import reduce

from engine.parallel.host_line import HostLine
from engine.parallel.lockstep import Lockstep
from engine.parallel.peers import Peers
from engine.step.agreement import Agreement, agreed, packed
from engine.step.shape import StepShape

# The neutral shape: agreeing on another shape with it makes that no larger.
_LEAST = StepShape(0, stopping=True)
_RECORD_BYTES = 8


class HostsLockstep:
    """An `engine.step.agreement.Agreement` of all ranks of a worker on several hosts."""

    def __init__(self, within: Lockstep, line: HostLine | None) -> None:
        """within: the agreement of this host's ranks; line: to the other hosts, on this host's first rank alone."""
        self._within = within
        self._line = line

    @property
    def due(self) -> bool:
        return self._within.due or (self._line is not None and self._line.due)

    def agree(self, proposal: StepShape) -> StepShape:
        """Raises RankLost."""
        shape = self._within.agree(proposal)
        if self._line is None:
            return self._within.agree(_LEAST)
        own = packed(shape)
        records = self._line.exchange(own.to_bytes(_RECORD_BYTES, "little"))
        others = (int.from_bytes(record, "little") for record in records)
        # Packed and unpacked, to equal what other ranks read: if ranks guess unequally deep, that may be more tokens
        # than any of them proposed.
        return self._within.agree(_unpacked(packed(reduce(agreed, others, _unpacked(own)))))


def _unpacked(shape: int) -> StepShape:
    return agreed(_LEAST, shape)


def agreement_of(peers: Peers) -> Agreement:
    """How this rank agrees with all others of its worker."""
    return peers.steps if peers.in_worker.layout.hosts == 1 else HostsLockstep(peers.steps, peers.line)
