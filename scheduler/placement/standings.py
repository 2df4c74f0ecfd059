"""Which of many workers are worth a look: in a mesh of hundreds a placement compares only a few dozen.

Workers that can stand in for one another (same model, role and KV namespace) form a field. A request is offered the
least used workers of each field, those that hold most of its prompt (the least used among equals, since hundreds may
hold a popular prefix), and some others in turn. The last group is needed because a slow worker looks little used:
without it a handful of slow workers would hide all others.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from mesh.domain.kv_identity import KvNamespace
from mesh.domain.workers import WorkerIdentity, WorkerRole
from scheduler.prefix_index import numbers

# Workers that are looked at, of each kind in each field; together at most three times as many.
LOOKS = 4
# The least used of up to this many workers are found by sorting them; among more, by walking through the field.
FEW = 24
# In a field of up to this many workers all are compared.
SMALL_FIELD = 24

Field = tuple[WorkerRole, KvNamespace]


class Standing:
    """The workers of one field, ordered by use. A worker is known by its first rank's number.

    `members` is a bit mask of the numbers of all their ranks.
    """

    def __init__(self) -> None:
        self.members = 0
        # Each worker's use, its number, and the bit mask of its ranks, in ascending order.
        self._ordered: list[tuple[float, int, int]] = []
        # Each worker's use, and the bit mask of its ranks.
        self._known: dict[int, tuple[float, int]] = {}
        # The worker of each rank.
        self._worker_of: dict[int, int] = {}
        self._turn = 0

    def __len__(self) -> int:
        return len(self._ordered)

    def place(self, worker: int, bits: int, use: float) -> None:
        """Add a worker with these ranks (bits), or note its changed use."""
        known = self._known.get(worker)
        if known is None:
            self.members |= bits
            self._worker_of.update(dict.fromkeys(numbers(bits), worker))
        else:
            before, _ = known
            if before == use:
                return
            del self._ordered[bisect_left(self._ordered, (before, worker, 0))]
        self._known[worker] = use, bits
        insort(self._ordered, (use, worker, bits))

    def remove(self, worker: int) -> None:
        known = self._known.pop(worker, None)
        if known is not None:
            use, bits = known
            del self._ordered[bisect_left(self._ordered, (use, worker, 0))]
            self.members &= ~bits
            for rank in numbers(bits):
                del self._worker_of[rank]

    def holding_most(self, groups: Iterable[int], count: int) -> list[int]:
        """Up to `count` workers from these groups of ranks (bits): earlier groups first, and the least used first in
        each.
        """
        found: dict[int, None] = {}
        for group in groups:
            for worker in self._least_used(group):
                found[worker] = None
                if len(found) == count:
                    return [*found]
        return [*found]

    def _least_used(self, ranks: int) -> Iterator[int]:
        """The workers that have any of these ranks (bits of this field), the least used first."""
        if ranks.bit_count() > FEW:
            if self.members.bit_count() == len(self._ordered):
                # Every worker has only one rank.
                return (worker for _, worker, _ in self._ordered if ranks >> worker & 1)
            return (worker for _, worker, bits in self._ordered if bits & ranks)
        known, workers = self._known, {self._worker_of[rank] for rank in numbers(ranks)}
        return iter(sorted(workers, key=lambda worker: (known[worker][0], worker)))

    def looks(self, more: int) -> list[int]:
        """The least used workers, `more` of them beyond the usual number, and others in turn; all workers of a small
        field.
        """
        ordered = self._ordered
        if len(ordered) <= SMALL_FIELD:
            return [worker for _, worker, _ in ordered]
        turns = [(self._turn + turn) % len(ordered) for turn in range(1, LOOKS + 1)]
        self._turn = turns[-1]
        return [*[worker for _, worker, _ in ordered[: LOOKS + more]], *[ordered[turn][1] for turn in turns]]


class Standings:
    """All fields of all models."""

    def __init__(self) -> None:
        self._fields: dict[str, dict[Field, Standing]] = {}
        # The field of each worker.
        self._field_of: dict[int, Standing] = {}

    def place(self, identity: WorkerIdentity, worker: int, bits: int, use: float) -> None:
        field = self._field_of.get(worker)
        if field is None:
            fields = self._fields.setdefault(identity.model, {})
            field = fields.setdefault((identity.role, identity.kv_namespace), Standing())
            self._field_of[worker] = field
        field.place(worker, bits, use)

    def remove(self, identity: WorkerIdentity, worker: int) -> None:
        self._field_of.pop(worker, None)
        fields = self._fields[identity.model]
        key = identity.role, identity.kv_namespace
        fields[key].remove(worker)
        if not fields[key]:
            del fields[key]
        if not fields:
            del self._fields[identity.model]

    def of(self, model: str) -> Iterable[Standing]:
        return self._fields.get(model, {}).values()
