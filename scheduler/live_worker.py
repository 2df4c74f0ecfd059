"""One live worker, as the registry keeps it, and the parts of it that placement compares."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from mesh.domain.placement import PlacementKey
from mesh.domain.workers import RankStatus, TransferCounters, WorkerIdentity, WorkerLoad, WorkerRole, WorkerState
from mesh.rank_choice import choose_rank
from scheduler.placement.candidates import CandidateWorker, Unreported
from scheduler.placement.placed_work import PlacedWork, placed_answers
from scheduler.placement.prompts import JointPrompts
from scheduler.prefix_index import Holders
from scheduler.ranks import Rank

# Why a worker in this state takes no requests.
_UNUSABLE = {WorkerState.DRAINING: "it is draining", WorkerState.STALLED: "it makes no progress"}


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one status stream to report for a worker."""

    worker_id: str
    incarnation: str
    stream: int


@dataclass(slots=True)
class Worker:
    """Written only by the registry, which calls `changed` or `placements_changed` afterwards."""

    identity: WorkerIdentity
    lease: Lease
    expires_at: float
    ranks: list[Rank]
    state: WorkerState = WorkerState.SERVING
    # Load and transfers of all ranks together.
    load: WorkerLoad = field(default_factory=WorkerLoad)
    transfers: TransferCounters = field(default_factory=TransferCounters)
    connected: bool = True
    # If prompts of its ranks begin together: when they began or will begin, and when they will be computed.
    prompts_begin_at: float = 0.0
    prompts_end_at: float = 0.0
    # For each block, a bit mask of the ranks that hold it: see `mesh.domain.workers.POOL_BITS`.
    cached: dict[bytes, int] = field(default_factory=dict)
    # How many of them lie in a pool.
    pool_blocks: int = 0
    # The worker's number among the standings: the number of its first rank.
    number: int = field(init=False)
    # The numbers of its ranks, as a bit mask.
    bits: int = field(init=False)
    # Whether it decodes; other workers only compute prompts.
    decodes: bool = field(init=False)
    # By rank. Cached, because a placement looks at dozens of workers, few of which have changed since the last
    # placement.
    _candidates: dict[int, CandidateWorker] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.number = self.ranks[0].number
        self.bits = sum(1 << rank.number for rank in self.ranks)
        self.decodes = self.identity.role is WorkerRole.DECODE

    @property
    def unreported(self) -> Unreported:
        """Work placed on it that its last status may not include."""
        return sum((rank.unreported for rank in self.ranks), Unreported())

    @property
    def use(self) -> float:
        """Comparable within a field; lower is better. It roughly tells which worker will have computed its prompts
        earlier, or has fewer requests per place.
        """
        if self.state is not WorkerState.SERVING or not self.connected:
            return float("inf")
        if self.identity.role is WorkerRole.PREFILL:
            return sum([rank.prompts_until or 0.0 for rank in self.ranks]) / len(self.ranks)
        return sum([rank.requests for rank in self.ranks]) / self.identity.max_requests

    def held_by(self, holders: int) -> Iterator[Rank]:
        """The ranks in a bit mask; bits beyond the ranks are ignored."""
        return (rank for index, rank in enumerate(self.ranks) if holders >> index & 1)

    def observe(self, statuses: Sequence[RankStatus], now: float) -> None:
        """Take the reports of all ranks after a step."""
        if not self._begins_prompts_together:
            for rank, status in zip(self.ranks, statuses, strict=True):
                rank.observe(status, now)
            return
        unseen = any(rank.has_unseen_prompts for rank in self.ranks)
        if not unseen and not any(status.load.waiting_requests for status in statuses):
            # The waiting prompts have begun, or there were none.
            self.prompts_begin_at = min(self.prompts_begin_at, now)
        for rank, status in zip(self.ranks, statuses, strict=True):
            rank.observe(status, now, self.prompts_begin_at)
        if unseen or any(status.load.queued_prefill_tokens for status in statuses):
            self.prompts_end_at = self._last_prompt_ends_at
        else:
            self.prompts_end_at = min(self.prompts_end_at, now)

    def add_placement(self, rank: int, key: PlacementKey, now: float, work: PlacedWork) -> None:
        """Count a placement as load of one rank."""
        begins_at, before = work.begins_at, self.prompts_begin_at
        if not self._begins_prompts_together or not work.prompt_seconds or begins_at is None:
            self.ranks[rank].add_placement(key, now, work)
            return
        self.prompts_begin_at = begins_at if begins_at >= self.prompts_end_at else min(before, begins_at)
        self.ranks[rank].add_placement(key, now, work, begins_at)
        self.prompts_end_at = self._last_prompt_ends_at

    @property
    def _begins_prompts_together(self) -> bool:
        """Whether prompts of its ranks begin together."""
        return len(self.ranks) > 1

    @property
    def _last_prompt_ends_at(self) -> float:
        return max([rank.prompts_until or 0.0 for rank in self.ranks])

    def _joint_prompts(self, rank: Rank) -> JointPrompts | None:
        """What placement knows of such prompts, as seen from this rank."""
        if not self._begins_prompts_together:
            return None
        begin_at = self.prompts_begin_at
        others_wait = all((other.prompts_until or 0.0) > begin_at for other in self.ranks if other is not rank)
        # A worker that does not decode makes no prompt wait.
        wait_steps = self.identity.prompt_wait_steps if self.decodes else 0
        return JointPrompts(
            begin_at=begin_at,
            end_at=self.prompts_end_at,
            others_wait=others_wait,
            step_tokens=self.identity.max_step_tokens,
            wait_steps=wait_steps,
            divided_tokens=self.identity.divided_tokens,
        )

    def changed(self) -> None:
        self._candidates.clear()

    def placements_changed(self) -> None:
        """As `changed`, but only the placements on the worker have changed."""
        before = self._candidates.get(0)
        if before is None or len(self.ranks) > 1:
            self._candidates.clear()
            return
        (rank,) = self.ranks
        self._candidates[0] = structs.replace(
            before,
            unreported=rank.unreported,
            prompts_until=rank.prompts_until,
            last_prompt_step=rank.last_step,
            answers=placed_answers([rank.answers]),
            ends=rank.known_ends(before.max_requests),
        )

    def prefixes(self, holders: Holders) -> list[int]:
        """How many leading blocks of a chain each rank holds in its pool."""
        if not self.bits & holders.anything:
            return [0] * len(self.ranks)
        return [holders.prefix(rank.number) for rank in self.ranks]

    def hosted(self, holders: Holders) -> list[int]:
        """How many blocks after those each rank holds in host memory."""
        if holders.anywhere is None or not self.bits & holders.anywhere.anything:
            return [0] * len(self.ranks)
        return [holders.hosted(rank.number) for rank in self.ranks]

    def found(self, holders: Holders) -> int:
        """The most leading blocks of a chain that a rank need not compute."""
        return max(map(sum, zip(self.prefixes(holders), self.hosted(holders), strict=True)))

    def candidate(self, prompt_tokens: int, holders: Holders) -> CandidateWorker:
        """The rank to which the worker would give such a prompt, with its part of the worker's room and the blocks that
        it holds of the prompt.
        """
        held, hosted = self.prefixes(holders), self.hosted(holders)
        index = self._rank_for(prompt_tokens, held, hosted) if len(self.ranks) > 1 else 0
        found = self.rank_candidate(index)
        if not held[index] + hosted[index]:
            return found
        return structs.replace(found, cached_blocks=held[index], host_blocks=hosted[index])

    def rank_candidate(self, index: int) -> CandidateWorker:
        """One rank, holding nothing of any prompt."""
        found = self._candidates.get(index)
        if found is None:
            found = self._candidates[index] = self._candidate(index, self.ranks[index])
        return found

    def _rank_for(self, prompt_tokens: int, held: Sequence[int], hosted: Sequence[int]) -> int:
        """The rank for a prompt. held: how many leading blocks of it each rank holds in its pool; hosted: how many more
        in host memory.
        """
        computes_prompt = self.identity.can_prefill or not self.decodes
        ranks = len(self.ranks)
        outlooks = [rank.outlook(*blocks) for rank, *blocks in zip(self.ranks, held, hosted, strict=True)]
        return choose_rank(outlooks, prompt_tokens, computes_prompt, self.identity.max_requests // ranks)

    def whole(self) -> CandidateWorker:
        """The worker with all its ranks, holding nothing of any prompt. Its first rank's measurements count for all."""
        if len(self.ranks) == 1:
            return self.rank_candidate(0)
        return CandidateWorker(
            identity=self.identity,
            total_blocks=self.identity.total_blocks,
            max_requests=self.identity.max_requests,
            unusable=_UNUSABLE.get(self.state),
            connected=self.connected,
            load=self.load,
            transfers=self.transfers,
            measured_at=self.ranks[0].measured_at,
            unreported=self.unreported,
            answers=placed_answers([rank.answers for rank in self.ranks]),
        )

    def _candidate(self, index: int, rank: Rank) -> CandidateWorker:
        ranks = len(self.ranks)
        max_requests = self.identity.max_requests // ranks
        return CandidateWorker(
            identity=self.identity,
            rank=index if ranks > 1 else None,
            total_blocks=self.identity.total_blocks // ranks,
            max_requests=max_requests,
            unusable=_UNUSABLE.get(self.state),
            connected=self.connected,
            load=rank.load,
            transfers=rank.status.transfers,
            measured_at=rank.measured_at,
            measures=rank.measures,
            unreported=rank.unreported,
            others_requests=sum([other.requests for other in self.ranks if other is not rank]),
            prompts_until=rank.prompts_until,
            last_prompt_step=rank.last_step,
            joint_prompts=self._joint_prompts(rank),
            step_began=rank.step_began,
            quiet_step_ms=rank.quiet_step_ms,
            answers=placed_answers([rank.answers]),
            ends=rank.known_ends(max_requests),
        )
