"""What Prometheus is told of a worker's ranks."""

from collections.abc import Sequence

from prometheus_client import Counter

from engine.balance.report import BalanceReport
from engine.protocol.messages import DraftCounts, StepResult
from mesh.domain.workers import TransferCounters, WorkerLoad
from mesh.observe import metrics


class RankMetrics:
    """Counts steps as they come, and shows the state of the ranks as often as it is told."""

    def __init__(self) -> None:
        self._moved = ReportedTotal(metrics.TRANSFER_BYTES)
        self._refused = ReportedTotal(metrics.TRANSFER_REFUSED)
        self._local_tcp = ReportedTotal(metrics.TRANSFER_LOCAL_TCP_BYTES)
        self._host_copied = ReportedTotal(metrics.ENGINE_HOST_BLOCKS)
        self._experts_moved = ReportedTotal(metrics.ENGINE_EXPERTS_MOVED)

    def count(self, result: StepResult) -> None:
        metrics.ENGINE_STEPS.inc()
        metrics.ENGINE_STORE_CACHED_TOKENS.inc(sum(output.store_cached_tokens or 0 for output in result.outputs))
        metrics.ENGINE_HOST_CACHED_TOKENS.inc(sum(output.host_cached_tokens or 0 for output in result.outputs))
        if result.drafts is not None:
            _count_drafts(result.drafts)
        for measure in result.sparse:
            metrics.ENGINE_SPARSE_RECALL.observe(measure.recall)
            metrics.ENGINE_SPARSE_DENSITY.observe(measure.density)

    def show_balance(self, balance: BalanceReport) -> None:
        metrics.ENGINE_EXPERT_IMBALANCE.labels("mean").set(balance.mean_imbalance)
        metrics.ENGINE_EXPERT_IMBALANCE.labels("largest").set(balance.largest_imbalance)
        self._experts_moved.report(balance.moved)

    def show(self, load: WorkerLoad, transfers: TransferCounters, total_blocks: int) -> None:
        """The state of all ranks together."""
        metrics.ENGINE_BLOCKS_TOTAL.set(total_blocks)
        metrics.ENGINE_BLOCKS_FREE.set(load.free_blocks)
        metrics.ENGINE_KV_USAGE.set(1 - load.free_blocks / max(total_blocks, 1))
        metrics.ENGINE_RUNNING.set(load.running_requests)
        metrics.ENGINE_WAITING.set(load.waiting_requests)
        metrics.ENGINE_QUEUED_PREFILL_TOKENS.set(load.queued_prefill_tokens)
        if load.host_tier is not None:
            metrics.ENGINE_HOST_BLOCKS_TOTAL.set(load.host_tier.total_blocks)
            metrics.ENGINE_HOST_BLOCKS_USED.set(load.host_tier.used_blocks)
            self._host_copied.report(load.host_tier.written_blocks, "written")
            self._host_copied.report(load.host_tier.read_blocks, "read")
        self._show_transfers(transfers)

    def show_ranks(self, loads: Sequence[WorkerLoad]) -> None:
        for rank, load in enumerate(loads):
            metrics.RANK_BLOCKS_FREE.labels(rank).set(load.free_blocks)
            metrics.RANK_RUNNING.labels(rank).set(load.running_requests)
            metrics.RANK_WAITING.labels(rank).set(load.waiting_requests)
            metrics.RANK_QUEUED_PREFILL_TOKENS.labels(rank).set(load.queued_prefill_tokens)

    def _show_transfers(self, transfers: TransferCounters) -> None:
        metrics.TRANSFER_OPEN.labels("landing").set(transfers.open_landings)
        metrics.TRANSFER_OPEN.labels("push").set(transfers.open_pushes)
        metrics.TRANSFER_OPEN.labels("fetch").set(transfers.open_fetches)
        metrics.TRANSFER_SLOTS_FREE.set(transfers.free_slots)
        metrics.TRANSFER_SLOTS_QUARANTINED.set(transfers.quarantined_slots)
        for transport, size_bytes in transfers.received_bytes.items():
            self._moved.report(size_bytes, "received", transport)
        for transport, size_bytes in transfers.sent_bytes.items():
            self._moved.report(size_bytes, "sent", transport)
        self._local_tcp.report(sum(transfers.local_tcp_bytes.values()))
        for reason, count in transfers.refused.items():
            self._refused.report(count, reason)


class ReportedTotal:
    """A counter that is fed with totals: it grows by the difference."""

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._last: dict[tuple[str, ...], int] = {}

    def report(self, total: int, *labels: str) -> None:
        # A total below the last one is that of a new process, which counts from 0.
        grown = total - self._last.get(labels, 0)
        (self._counter.labels(*labels) if labels else self._counter).inc(grown if grown >= 0 else total)
        self._last[labels] = total


def _count_drafts(drafts: DraftCounts) -> None:
    for place, (verified, accepted) in enumerate(zip(drafts.verified, drafts.accepted, strict=True), start=1):
        if verified:
            metrics.ENGINE_DRAFTS.labels(place, "accepted").inc(accepted)
            metrics.ENGINE_DRAFTS.labels(place, "rejected").inc(verified - accepted)
    for tokens, rows in enumerate(drafts.yields, start=1):
        metrics.ENGINE_DRAFT_ROWS.labels(tokens).inc(rows)
    metrics.ENGINE_RELAXED_TOKENS.inc(drafts.relaxed)
