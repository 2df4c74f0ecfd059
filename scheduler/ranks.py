"""One DP rank of a live worker, as the registry keeps it: its load, the age of that, and the placements since."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from mesh.costs import CostModel
from mesh.domain.placement import PlacementKey
from mesh.domain.workers import PromptPace, RankStatus, TransferCounters, WorkerLoad, WorkerSpeed
from mesh.rank_choice import RankOutlook
from scheduler.placement.candidates import MeasurementTimes, Measures, Unreported
from scheduler.placement.estimates import measures, paced_token_ms, prompt_slowness
from scheduler.placement.placed_work import Answers, PlacedWork
from scheduler.placement.prompts import LastStep, last_step_of, prompt_step_tokens, steps_of

# Longest time from a placement until its rank has the request, and from the end of a step until its report is here.
ON_ITS_WAY_SECONDS = 0.02
# A request overdue by this much has ended; its gateway, which should have said so, is gone.
OVERDUE_SECONDS = 1.0
# Weight of the past against one more step without prompts.
QUIET_STEP_DECAY = 0.8


@dataclass(slots=True)
class Measurement:
    """A number in every status, and when it last changed: an unchanged number counts as old."""

    # None while the rank does not know it.
    value: float | None = None
    changed_at: float = float("-inf")

    def observe(self, value: float | None, now: float) -> None:
        if value != self.value:
            self.value, self.changed_at = value, now


def queued_seconds(load: WorkerLoad, costs: CostModel, most: int) -> float | None:
    """Seconds that a rank needs for the prompts that it has, as fast as it measured; None if it measured nothing.

    most: tokens of a step.
    """
    exact, slowness = load.exact_pace, prompt_slowness(load, costs)
    if exact is None or slowness is None:
        return None
    sparse, queued = load.sparse_prompts or exact, load.queued_prefill_tokens
    seconds = _tokens_seconds(queued - load.queued_sparse_tokens, exact, costs, exact is load.sparse_prompts)
    seconds += _tokens_seconds(load.queued_sparse_tokens, sparse, costs, sparse is load.sparse_prompts)
    return seconds + slowness * steps_of(queued, most) * costs.prefill_step_ms / 1000


def _tokens_seconds(tokens: int, pace: PromptPace, costs: CostModel, sparse: bool) -> float:
    """Seconds of these tokens, without what their steps take."""
    alone_ms = costs.prompt_token_ms(pace.context_tokens, sparse)
    return tokens / pace.tokens_per_second * (alone_ms / paced_token_ms(pace, costs, sparse))


@dataclass(slots=True)
class Rank:
    """Written only by the registry. Most workers have one rank."""

    # The rank's number in the prefix index.
    number: int
    # What its measurements are compared with, and the most tokens that it computes in a step.
    costs: CostModel
    max_step_tokens: int
    # How fast it was before it served; None if it was not measured.
    speed: WorkerSpeed | None = None
    status: RankStatus = field(default_factory=lambda: RankStatus(WorkerLoad(), TransferCounters(), 0))
    # Placements that the last status may not include yet, and when they were made.
    placed: dict[PlacementKey, tuple[float, PlacedWork]] = field(default_factory=dict)
    # The sum of `placed`.
    unreported: Unreported = field(default_factory=Unreported)
    # When it will have computed its prompts, as far as this scheduler can tell; None if unknown.
    prompts_until: float | None = None
    # The last step with prompts until then.
    last_step: LastStep = field(default_factory=LastStep)
    # Smoothed duration of steps without prompts, as far as reports tell; None before the first.
    quiet_step_ms: float | None = None
    # The answers of requests that were placed here to decode and have not been reported as ended.
    answers: Answers = field(default_factory=Answers)
    # When it last reported a changed load.
    _load_at: float = float("-inf")
    # Values of `load` and `transfers`, with their ages.
    _prefill_rate: Measurement = field(default_factory=Measurement)
    _sparse_rate: Measurement = field(default_factory=Measurement)
    _step_time: Measurement = field(default_factory=Measurement)
    _fetch_bandwidth: Measurement = field(default_factory=Measurement)
    _push_bandwidth: Measurement = field(default_factory=Measurement)
    _disk_fetch_bandwidth: Measurement = field(default_factory=Measurement)
    # Cached result of `measures` since the last status.
    _measures: Measures | None = None

    @property
    def requests(self) -> int:
        """Requests that it has, and those placed on it since its last report."""
        return self.load.running_requests + self.load.waiting_requests + self.unreported.requests

    @property
    def load(self) -> WorkerLoad:
        return self.status.load

    def outlook(self, cached_blocks: int, host_blocks: int = 0) -> RankOutlook:
        """What a new request would find here: leading blocks of its prompt in the rank's pool, and more in its host
        memory.
        """
        load, unreported = self.load, self.unreported
        return RankOutlook(
            live_requests=self.requests,
            queued_tokens=load.queued_prefill_tokens + unreported.prefill_tokens,
            free_blocks=load.free_blocks,
            cached_blocks=cached_blocks,
            pending_blocks=load.waiting_blocks + unreported.blocks,
            host_blocks=host_blocks,
        )

    def observe(self, status: RankStatus, now: float, begin_at: float = 0.0) -> None:
        """begin_at: when the prompts that wait here begin; by default at once."""
        if status.load != self.status.load:
            self._correct_prompts(status.load, now, begin_at)
            self._measure_quiet_step(status.load, now)
            # The step that has ended began with all that had arrived by the end of the step before it.
            self.settle_placements_before(self._load_at - ON_ITS_WAY_SECONDS)
            self._load_at = now
        self.status, self._measures = status, None
        if len(self.answers) > self.requests:
            self.answers.forget_before(now - OVERDUE_SECONDS)
        exact, sparse = status.load.exact_pace, status.load.sparse_prompts
        self._prefill_rate.observe(None if exact is None else exact.tokens_per_second, now)
        self._sparse_rate.observe(None if sparse is None else sparse.tokens_per_second, now)
        self._step_time.observe(status.load.decode_step_ms, now)
        self._fetch_bandwidth.observe(status.transfers.fetch_bytes_per_second, now)
        self._push_bandwidth.observe(status.load.push_bytes_per_second, now)
        self._disk_fetch_bandwidth.observe(status.transfers.disk_fetch_bytes_per_second, now)

    @property
    def measured_at(self) -> MeasurementTimes:
        return MeasurementTimes(
            prefill=self._prefill_rate.changed_at,
            step=self._step_time.changed_at,
            fetch=self._fetch_bandwidth.changed_at,
            push=self._push_bandwidth.changed_at,
            disk_fetch=self._disk_fetch_bandwidth.changed_at,
            sparse=self._sparse_rate.changed_at,
        )

    @property
    def step_began(self) -> float | None:
        """When its current step began, according to its reports; None before the first."""
        return None if self._load_at == float("-inf") else self._load_at

    @property
    def measures(self) -> Measures:
        """Its measurements, relative to the cost model."""
        if self._measures is None:
            self._measures = measures(self.status.load, self.status.transfers, self.measured_at, self.costs, self.speed)
        return self._measures

    def known_ends(self, most: int) -> Sequence[float]:
        """The ends of its running requests at the latest, ascending; empty if it has fewer than `most`, or if some are
        unknown.
        """
        reported = self.load.running_requests + self.load.waiting_requests
        return () if self.requests < most or len(self.answers) < reported else self.answers.latest_ends[:most]

    def add_placement(self, key: PlacementKey, now: float, work: PlacedWork, begins_at: float = 0.0) -> None:
        """begins_at: when the prompt begins; by default when the rank has computed the prompts before it."""
        self.settle_placement(key)
        self.placed[key] = (now, work)
        self.unreported += work.load
        if work.answer is not None:
            self.answers.add(key, work.answer)
        if work.prompt_seconds:
            comes_at, tokens = max(now, work.comes_at), work.load.prefill_tokens
            until = max(comes_at, begins_at, self.prompts_until or now) + work.prompt_seconds
            most = prompt_step_tokens(self.load, self.max_step_tokens)
            self.last_step = self.last_step.after(tokens, comes_at, until, work.prompt_seconds, most)
            self.prompts_until = until

    @property
    def has_unseen_prompts(self) -> bool:
        """Whether its next report may lack prompts that were placed on it."""
        return any(work.prompt_seconds for work in self._unseen())

    def _unseen(self) -> list[PlacedWork]:
        """The work that its next report may not include yet."""
        since = self._load_at - ON_ITS_WAY_SECONDS
        return [work for at, work in self.placed.values() if max(at, work.comes_at) >= since]

    def _correct_prompts(self, load: WorkerLoad, now: float, begin_at: float) -> None:
        """Correct `prompts_until` by a report: the rank has ended a step and begun another with the requests that it
        knows.

        Prompts that arrived during the step are not in the reported load, and neither are those still on their way. So
        the report with the latter gives a lower bound of the work left, and with all unseen prompts an upper bound.
        """
        most = prompt_step_tokens(load, self.max_step_tokens)
        queued = queued_seconds(load, self.costs, most)
        if queued is None:
            return
        works = self._unseen()
        # Those that are on their way wait for the step after the one that has begun.
        later = [work for work in works if work.comes_at > now]
        unseen, later_seconds = _prompt_seconds(works), _prompt_seconds(later)
        latest = max(now, begin_at) if unseen or load.waiting_requests else now
        until = min(max(self.prompts_until or now, now + queued + later_seconds), latest + queued + unseen)
        if later:
            self.last_step = last_step_of(_prompt_tokens(later), until - later_seconds, until, most)
        else:
            tokens = load.queued_prefill_tokens + _prompt_tokens(works)
            self.last_step = last_step_of(tokens, latest, until, most)
        self.prompts_until = until

    def _measure_quiet_step(self, load: WorkerLoad, now: float) -> None:
        """Measure a step that had no prompts, judged by the previous report and by the placements before the step
        began.
        """
        before, whole_ms = self.load, (now - self._load_at) * 1000
        if load.decode_step_ms is None or load.decode_step_ms == before.decode_step_ms:
            return
        prompts = [work.load.prefill_tokens for at, work in self.placed.values() if at <= self._load_at]
        if before.queued_prefill_tokens or any(prompts):
            return
        # The rank may have been idle before the step.
        step_ms, known = min(whole_ms, load.decode_step_ms), self.quiet_step_ms
        self.quiet_step_ms = step_ms if known is None else step_ms + QUIET_STEP_DECAY * (known - step_ms)

    def settle_placement(self, key: PlacementKey) -> bool:
        """A placed request has ended. If the rank has not reported since the placement, it may never report the prompt,
        so the prompt's time is taken back.

        False if nothing was known of it any more.
        """
        had_answer = self.answers.remove(key)
        if key not in self.placed:
            return had_answer
        placed_at, work = self.placed[key]
        if self.prompts_until is not None and placed_at >= self._load_at:
            self.prompts_until -= work.prompt_seconds
        self._forget(key)
        return True

    def settle_placements_before(self, time: float) -> None:
        for key in [key for key, (at, work) in self.placed.items() if max(at, work.comes_at) <= time]:
            self._forget(key)

    def _forget(self, key: PlacementKey) -> None:
        self.unreported -= self.placed.pop(key)[1].load


def _prompt_seconds(works: Iterable[PlacedWork]) -> float:
    return sum(work.prompt_seconds for work in works)


def _prompt_tokens(works: Iterable[PlacedWork]) -> int:
    return sum(work.load.prefill_tokens for work in works)
