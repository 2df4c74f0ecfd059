"""What the engine reports to its service."""

from collections.abc import Callable, Sequence

from engine.balance.report import BalanceReport
from engine.batch import Sample
from engine.blocks.kv_pool import BlockPool
from engine.config import MOST_DRAFTS
from engine.moves.transfers import Transfers
from engine.protocol.messages import DraftCounts, Output, StepResult
from engine.requests.sparse_measure import SparseMeasure
from mesh.domain.workers import WorkerLoad


class Report:
    """What the engine has not reported yet.

    Attributes:
        outputs: of steps, and of what happened between them.
        load_changed: the load may have changed because a transfer ended.
        drafts: what became of drafts; None if no row of a request with drafts was collected.
    """

    def __init__(self, pool: BlockPool, transfers: Transfers) -> None:
        self._pool = pool
        self._transfers = transfers
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

    def drain(
        self,
        step: int,
        load: Callable[[], WorkerLoad],
        balance: BalanceReport | None,
        sparse: Callable[[], Sequence[SparseMeasure]],
    ) -> StepResult | None:
        """Outputs, blocks that came or went, and counters of transfers; None if there is nothing of them."""
        outputs, self.outputs = self.outputs, []
        blocks, counters = self._pool.drain_changes(), self._transfers.poll_counters()
        if not (outputs or blocks.stored or blocks.removed or counters or self.load_changed):
            return None
        self.load_changed = False
        drafts, self.drafts = self.drafts, None
        return StepResult(
            step,
            outputs,
            load(),
            blocks.stored,
            blocks.parents,
            blocks.removed,
            counters,
            drafts,
            balance,
            blocks.draftless,
            blocks.tenants,
            list(sparse()),
        )
