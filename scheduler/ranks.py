"""One DP rank of a live worker, as the registry keeps it: its load, how old that is, and what was placed since."""

from dataclasses import dataclass, field

from mesh.costs import CostModel
from mesh.domain.workers import RankStatus, TransferCounters, WorkerLoad
from scheduler.candidates import MeasurementTimes, Measures, Unreported
from scheduler.estimates import measures

# A generation, and the number of the attempt.
PlacementKey = tuple[str, int]
# From a placement until its rank has the prompt, at most, and from the end of a step until its report is here.
ON_ITS_WAY_SECONDS = 0.05


@dataclass(slots=True)
class Measurement:
    """A number that comes with every status, and when it last changed: an equal number is an old one."""

    # None while the rank does not know it.
    value: float | None = None
    changed_at: float = float("-inf")

    def observe(self, value: float | None, now: float) -> None:
        if value != self.value:
            self.value, self.changed_at = value, now


def queued_seconds(load: WorkerLoad) -> float | None:
    """Time of the prompts that a rank has, at the rates that it measured; None if it measured none."""
    exact = load.exact_pace
    if exact is None:
        return None
    sparse = load.sparse_prompts or exact
    exact_tokens = load.queued_prefill_tokens - load.queued_sparse_tokens
    return exact_tokens / exact.tokens_per_second + load.queued_sparse_tokens / sparse.tokens_per_second


@dataclass(slots=True)
class Rank:
    """Written by the registry alone. Most workers have one."""

    # Its number in the prefix index.
    number: int
    status: RankStatus = field(default_factory=lambda: RankStatus(WorkerLoad(), TransferCounters(), 0))
    # Placements that the last status may not have counted yet, when they were made, and for how many seconds the rank
    # is predicted to compute their prompts.
    placed: dict[PlacementKey, tuple[float, Unreported, float]] = field(default_factory=dict)
    # The sum of `placed`.
    unreported: Unreported = field(default_factory=Unreported)
    # When it will have computed its prompts, as far as this scheduler can tell; None if it cannot.
    prompts_until: float | None = None
    # When it last reported another load than before.
    _load_at: float = float("-inf")
    # Values of `load` and `transfers`, with their ages.
    _prefill_rate: Measurement = field(default_factory=Measurement)
    _sparse_rate: Measurement = field(default_factory=Measurement)
    _step_time: Measurement = field(default_factory=Measurement)
    _fetch_bandwidth: Measurement = field(default_factory=Measurement)
    _push_bandwidth: Measurement = field(default_factory=Measurement)
    _disk_fetch_bandwidth: Measurement = field(default_factory=Measurement)
    # What `measures` found since the last status, for one cost model.
    _measures: tuple[CostModel, Measures] | None = None

    @property
    def requests(self) -> int:
        """Those that it has, and those placed on it since."""
        return self.load.running_requests + self.load.waiting_requests + self.unreported.requests

    @property
    def load(self) -> WorkerLoad:
        return self.status.load

    def observe(self, status: RankStatus, now: float) -> None:
        if status.load != self.status.load:
            self._correct_prompts(status.load, now)
            self._load_at = now
        self.status, self._measures = status, None
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
            self._prefill_rate.changed_at,
            self._step_time.changed_at,
            self._fetch_bandwidth.changed_at,
            self._push_bandwidth.changed_at,
            self._disk_fetch_bandwidth.changed_at,
            self._sparse_rate.changed_at,
        )

    @property
    def step_began(self) -> float | None:
        """When it last began a step, as far as its reports say; None before the first."""
        return None if self._load_at == float("-inf") else self._load_at

    def measures(self, costs: CostModel) -> Measures:
        """Its measurements beside these costs."""
        if self._measures is None or self._measures[0] is not costs:
            load, transfers = self.status.load, self.status.transfers
            rates = transfers.fetch_bytes_per_second, transfers.disk_fetch_bytes_per_second
            self._measures = costs, measures(load, *rates, self.measured_at, costs)
        return self._measures[1]

    def add_placement(self, key: PlacementKey, now: float, placed: Unreported, prompt_seconds: float) -> None:
        """prompt_seconds: how long the rank is predicted to compute for it."""
        self.settle_placement(key)
        self.placed[key] = (now, placed, prompt_seconds)
        self.unreported += placed
        if prompt_seconds:
            self.prompts_until = max(now, self.prompts_until or now) + prompt_seconds

    def _correct_prompts(self, load: WorkerLoad, now: float) -> None:
        """The rank has ended a step, and has begun another with what it knows of.

        Prompts that came while the step ran are not in its load: so many are left at least, and so many more at most.
        """
        queued = queued_seconds(load)
        if queued is None:
            return
        since = self._load_at - ON_ITS_WAY_SECONDS
        unseen = sum(seconds for placed_at, _, seconds in self.placed.values() if placed_at >= since)
        self.prompts_until = min(max(self.prompts_until or now, now + queued), now + queued + unseen)

    def settle_placement(self, key: PlacementKey) -> bool:
        """It has ended: if the rank has not reported since, it may never have had its prompt, and never speak of it.

        False if it was settled before.
        """
        if key not in self.placed:
            return False
        placed_at, _, prompt_seconds = self.placed[key]
        if self.prompts_until is not None and placed_at >= self._load_at:
            self.prompts_until -= prompt_seconds
        self._forget(key)
        return True

    def settle_placements_before(self, time: float) -> None:
        for key in [key for key, (placed_at, *_) in self.placed.items() if placed_at <= time]:
            self._forget(key)

    def _forget(self, key: PlacementKey) -> None:
        self.unreported -= self.placed.pop(key)[1]
