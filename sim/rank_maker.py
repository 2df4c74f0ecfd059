"""Makes the ranks of a simulated worker: engines whose device, transfers and clock are simulated."""

from collections.abc import Callable, Mapping
from functools import partial

from engine.config import EngineConfig
from engine.protocol.messages import StepResult, TransferNews
from mesh.costs import CostModel
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.workers import WorkerRole, WorkerSpeed
from sim.agent import SimulatedAgent, SimulatedLandings
from sim.device import DeviceSpec, LocalClock, SimulatedDevice, speed_of
from sim.fleet import FleetConfig, GroupConfig
from sim.host_memory import SimulatedSlots
from sim.lockstep import Lockstep
from sim.network import Link
from sim.rank import SimulatedRank
from sim.store import SimulatedStore
from sim.timeline import Timeline
from transfer.config import TransferConfig

MODEL = "simulated"


class RankMaker:
    def __init__(
        self,
        timeline: Timeline,
        fleet: FleetConfig,
        costs: Mapping[WorkerRole, CostModel],
        namespace: KvNamespace,
        stores: Mapping[str, SimulatedStore],
    ) -> None:
        """costs: of the workers of each role. stores: by their ids."""
        self._timeline = timeline
        self._fleet = fleet
        self._costs = costs
        self._namespace = namespace
        self._store_by_id = stores
        self._landings = SimulatedLandings()

    def speed(self, role: WorkerRole, slowness: float) -> WorkerSpeed | None:
        """What a worker measured of itself that is `slowness` times as slow as others; None if workers do not."""
        group = self._fleet.group(role)
        if not self._fleet.speeds:
            return None
        return speed_of(self._costs[role], group.max_requests, group.max_step_tokens, slowness)

    def make(
        self,
        role: WorkerRole,
        slowness: float,
        on_news: Callable[[TransferNews], None],
        on_result: Callable[[StepResult, int], None],
        on_quiet: Callable[[float], None],
    ) -> SimulatedRank | Lockstep:
        """The rank of a worker, or its ranks in lockstep. `on_result` gets a step's result and the rank's number."""
        ranks = self._fleet.group(role).ranks
        if ranks == 1:
            return self._rank(role, slowness, on_news, lambda result: on_result(result, 0), on_quiet)
        lockstep = Lockstep(self._timeline, on_result, self._fleet.group(role).parallel)
        for number in range(ranks):
            observe = partial(lockstep.observe, number)
            lockstep.add(self._rank(role, slowness, on_news, observe, on_quiet, lockstep.wake, number))
        return lockstep

    def _rank(
        self,
        role: WorkerRole,
        slowness: float,
        on_news: Callable[[TransferNews], None],
        on_result: Callable[[StepResult], None],
        on_quiet: Callable[[float], None],
        on_wake: Callable[[], None] | None = None,
        number: int = 0,
    ) -> SimulatedRank:
        made: list[SimulatedRank] = []

        def wake() -> None:
            made[0].wake()

        clock = LocalClock(self._timeline.now)
        device = self._device(role, slowness, clock, wake)
        costs = self._costs[role]
        agent = SimulatedAgent(
            self._timeline,
            self._landings,
            Link(self._timeline, costs.push_bytes_per_second),
            self._store_by_id,
            self._namespace,
            self._fleet.block_bytes,
            costs,
            lambda: clock.now if clock.in_step else self._timeline.now,
            wake,
        )
        config = self._engine_config(self._fleet.group(role))
        rank = SimulatedRank(
            self._timeline, config, device, clock, agent, on_news, on_result, on_quiet, on_wake, number
        )
        rank.shortest_first, rank.every_token = self._fleet.shortest_first, self._fleet.every_token
        made.append(rank)
        return rank

    def _device(
        self, role: WorkerRole, slowness: float, clock: LocalClock, wake: Callable[[], None]
    ) -> SimulatedDevice:
        group, costs, block_bytes = self._fleet.group(role), self._costs[role], self._fleet.block_bytes
        spec = DeviceSpec(
            MODEL,
            self._namespace,
            self._fleet.context_tokens,
            group.total_blocks,
            block_bytes,
            group.captured_rows,
            group.captured_prompt_tokens,
            self.speed(role, slowness),
        )
        slots = None
        if group.host_blocks:
            rate = costs.host_read_bytes_per_second
            slots = SimulatedSlots(group.host_blocks, block_bytes, self._timeline, rate, wake)
        device = SimulatedDevice(spec, costs, clock, self._timeline.at, slots)
        device.slowness = slowness
        return device

    def _engine_config(self, group: GroupConfig) -> EngineConfig:
        return EngineConfig(
            backend="oracle",
            max_requests=group.max_requests,
            max_step_tokens=group.max_step_tokens,
            mixed_step_ms=group.mixed_step_ms,
            prompt_share=group.prompt_share,
            prefix_cache=group.prefix_cache,
            transfer=TransferConfig(layerwise_tokens=group.layerwise_tokens),
            sparse_prefill=self._fleet.sparse_prefill,
            parallel=group.parallel,
        )
