"""One rank of a worker as its service sees it: its last reports, and the requests submitted since."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from engine.protocol.messages import Output, Ready, StepResult, Submit
from mesh.blocks import blocks_for
from mesh.domain.workers import RankStatus, TransferCounters, WorkerLoad
from mesh.rank_choice import RankOutlook
from worker.chains import Chains, Found


@dataclass(slots=True)
class _Live:
    """A live request: prompt tokens that the rank has yet to compute for it, and blocks that its prompt takes."""

    uncomputed_tokens: int
    blocks: int


class RankView:
    """Written only by the worker's RankGroup.

    Attributes:
        load: as of the rank's last step.
        transfers: as last reported.
        chains: the reusable blocks of the rank's pool.
        hosted: the blocks in its host memory.
    """

    def __init__(self, ready: Ready) -> None:
        self.load = WorkerLoad(free_blocks=ready.total_blocks, host_tier=ready.host_tier)
        self.transfers = TransferCounters()
        self.chains = Chains()
        self.hosted: set[bytes] = set()
        # By key, in the order in which they were submitted.
        self._live: dict[int, _Live] = {}

    @property
    def status(self) -> RankStatus:
        return RankStatus(self.load, self.transfers, len(self.chains))

    def outlook(self, found: Found) -> RankOutlook:
        """What a new request would find here. found: what the rank holds of its prompt."""
        return RankOutlook(
            live_requests=len(self._live),
            queued_tokens=sum(live.uncomputed_tokens for live in self._live.values()),
            free_blocks=self.load.free_blocks,
            cached_blocks=found.cached,
            pending_blocks=self.load.waiting_blocks + self._unreported_blocks,
            host_blocks=found.hosted,
        )

    @property
    def _unreported_blocks(self) -> int:
        """Blocks for the requests that the load does not include yet: those submitted last."""
        unreported = len(self._live) - self.load.running_requests - self.load.waiting_requests
        return sum(live.blocks for live in islice(reversed(self._live.values()), max(unreported, 0)))

    def submitted(self, submit: Submit) -> None:
        tokens = len(submit.request.token_ids)
        self._live[submit.key] = _Live(0 if submit.remote_prefill else tokens, blocks_for(tokens + 1))

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
        self.hosted.difference_update(result.unhosted_blocks)
        self.hosted.update(result.hosted_blocks)
        if self._live:
            self._count(result.outputs)

    def _count(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if output.finish is not None or output.refusal is not None:
                del self._live[output.key]
            elif output.cached_tokens is not None:
                # cached_tokens is reported with the first token, so the prompt is computed.
                self._live[output.key].uncomputed_tokens = 0
