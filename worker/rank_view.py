"""One rank of a worker as its service sees it: its last reports, and the requests submitted since."""

from collections.abc import Sequence

from engine.protocol.messages import Output, Ready, StepResult, Submit
from mesh.domain.workers import RankStatus, TransferCounters, WorkerLoad
from mesh.rank_choice import RankOutlook
from worker.chains import Chains


class RankView:
    """Written only by the worker's RankGroup.

    Attributes:
        load: as of the rank's last step.
        transfers: as last reported.
        chains: the reusable blocks of the rank's pool.
    """

    def __init__(self, ready: Ready) -> None:
        self.load = WorkerLoad(free_blocks=ready.total_blocks)
        self.transfers = TransferCounters()
        self.chains = Chains()
        # By key of each live request: prompt tokens that the rank has yet to compute for it.
        self._uncomputed_tokens: dict[int, int] = {}

    @property
    def status(self) -> RankStatus:
        return RankStatus(self.load, self.transfers, len(self.chains))

    def outlook(self, cached_blocks: int) -> RankOutlook:
        """What a new request would find here. cached_blocks: leading blocks of its prompt that the rank holds."""
        return RankOutlook(
            live_requests=len(self._uncomputed_tokens),
            queued_tokens=sum(self._uncomputed_tokens.values()),
            free_blocks=self.load.free_blocks,
            cached_blocks=cached_blocks,
        )

    def submitted(self, submit: Submit) -> None:
        self._uncomputed_tokens[submit.key] = 0 if submit.remote_prefill else len(submit.request.token_ids)

    def observe(self, result: StepResult) -> None:
        self.load = result.load
        self.transfers = result.transfers or self.transfers
        self.chains.observe(
            result.stored_blocks,
            result.stored_parents,
            result.removed_blocks,
            result.stored_tenants,
            result.draftless_blocks,
        )
        if self._uncomputed_tokens:
            self._count(result.outputs)

    def _count(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if output.finish is not None or output.refusal is not None:
                del self._uncomputed_tokens[output.key]
            elif output.cached_tokens is not None:
                # cached_tokens comes with the first token, so the prompt is computed.
                self._uncomputed_tokens[output.key] = 0
