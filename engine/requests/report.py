"""What the engine reports to its service."""

from engine.backend import Backend
from engine.batch import Sample
from engine.blocks.kv_pool import BlockPool
from engine.drafts.config import MOST_DRAFTS
from engine.moves.host_tier import HostTier
from engine.moves.transfers import Transfers
from engine.pace.pacing import Pacing
from engine.pace.smoothing import SmoothedRatio
from engine.plan.schedule import RequestSchedule
from engine.protocol.messages import DraftCounts, Output, StepResult
from mesh.domain.workers import WorkerLoad

# Weight of the past against one more finished request.
REQUEST_DECAY = 0.95


class Report:
    """What the engine has not reported yet.

    Attributes:
        outputs: of steps, and of what happened between them.
        load_changed: the load may have changed because a transfer ended.
        drafts: what became of drafts; None if no row of a request with drafts was collected.
    """

    def __init__(
        self,
        pool: BlockPool,
        transfers: Transfers,
        schedule: RequestSchedule,
        pacing: Pacing,
        host: HostTier | None = None,
    ) -> None:
        """host: KV in host memory; None if none is kept there."""
        self._pool = pool
        self._host = host
        self._transfers = transfers
        self._schedule = schedule
        self._pacing = pacing
        # Tokens of each finished request.
        self._output_tokens = SmoothedRatio()
        self.outputs: list[Output] = []
        self.load_changed = False
        self.drafts: DraftCounts | None = None

    @property
    def pending(self) -> bool:
        """Whether `drain` would report anything without another step."""
        return bool(self.outputs) or self.load_changed or self._transfers.changed

    def add_drafts(self, verified: int, sample: Sample) -> None:
        """Count a decoding request's row, which verified this many drafts and yielded this sample."""
        if self.drafts is None:
            self.drafts = DraftCounts([0] * MOST_DRAFTS, [0] * MOST_DRAFTS, yields=[0] * (1 + MOST_DRAFTS))
        self.drafts.yields[len(sample.token_ids) - 1] += 1
        for position in range(verified):
            self.drafts.verified[position] += 1
            self.drafts.accepted[position] += position < len(sample.token_ids) - 1
        self.drafts.relaxed += sample.relaxed

    def add_finished(self, output_tokens: int) -> None:
        """Count a request that ended with this many tokens."""
        self._output_tokens.observe(output_tokens, 1.0, REQUEST_DECAY)

    def load(self, requests: int) -> WorkerLoad:
        """requests: how many have not ended."""
        schedule, meter = self._schedule, self._pacing.meter
        waiting = schedule.waiting
        return WorkerLoad(
            running_requests=requests - waiting,
            waiting_requests=waiting,
            queued_prefill_tokens=schedule.queued_prefill_tokens,
            free_blocks=self._pool.free_blocks,
            prefill_tokens_per_second=meter.prefill_tokens_per_second,
            decode_step_ms=meter.decode_step_ms,
            mean_output_tokens=self._output_tokens.value,
            decode_step_requests=meter.decode_step_requests,
            push_bytes_per_second=self._transfers.push_bytes_per_second,
            exact_prompts=meter.exact_prompts,
            sparse_prompts=meter.sparse_prompts,
            queued_sparse_tokens=schedule.queued_sparse_tokens,
            waiting_blocks=schedule.waiting_blocks,
            even_step_tokens=self._pacing.even_step_tokens(
                len(schedule.decoding), schedule.prompts_ahead(self._transfers.awaited)
            ),
            host_tier=None if self._host is None else self._host.status,
        )

    def drain(self, step: int, requests: int, backend: Backend) -> StepResult | None:
        """Outputs, blocks that came or went, and counters of transfers; None if there are none.

        step: how many steps were launched; requests: see `load`.
        """
        outputs, self.outputs = self.outputs, []
        blocks, counters = self._pool.drain_changes(), self._transfers.poll_counters()
        hosted, unhosted = ([], []) if self._host is None else self._host.blocks.drain_changes()
        changed = outputs or blocks.stored or blocks.removed or counters or self.load_changed
        if not (changed or hosted or unhosted):
            return None
        self.load_changed = False
        drafts, self.drafts = self.drafts, None
        return StepResult(
            step=step,
            outputs=outputs,
            load=self.load(requests),
            stored_blocks=blocks.stored,
            stored_parents=blocks.parents,
            removed_blocks=blocks.removed,
            transfers=counters,
            drafts=drafts,
            balance=backend.balance,
            draftless_blocks=blocks.draftless,
            stored_tenants=blocks.tenants,
            sparse=list(backend.drain_sparse_measures()),
            hosted_blocks=hosted,
            unhosted_blocks=unhosted,
        )
