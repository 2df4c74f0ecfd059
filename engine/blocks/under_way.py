"""Which blocks the next step, or the one in flight, computes, and which are being read: equal prompts wait for them."""

from collections.abc import Collection, Iterable
from typing import Protocol

from engine.plan.tenants import TenantStanding
from engine.requests.progress import Progress
from mesh.blocks import BLOCK_TOKENS
from mesh.domain.shares import Share


class Computed(Protocol):
    """What `BlocksUnderWay` reads of a request whose blocks others could share."""

    @property
    def progress(self) -> Progress: ...

    @property
    def share(self) -> Share: ...

    def content(self, index: int) -> bytes | None:
        """The hash of its block of that index, and so of all before it; None if the block is not full."""
        ...


class BlocksUnderWay:
    """Assumes that the step has tokens left for the request that asks.

    Then the prompts that go before that request, and those admitted before it, are computed to their end in this step.
    For all other requests, only blocks that a step in flight computes count, and those that are read from host memory.
    """

    def __init__(
        self,
        decoding: Iterable[Computed],
        prompts: Iterable[Computed],
        standing: TenantStanding,
        arriving: Collection[bytes] = (),
    ) -> None:
        """arriving: contents that are being read into the pool."""
        self._standing = standing
        self._arriving = set(arriving)
        self._prompts = list(prompts)
        self._admitted: list[Computed] = []
        # Full blocks in flight, which are not in the pool yet.
        self._in_flight = [
            (request, blocks)
            for request in (*decoding, *self._prompts)
            if (blocks := request.progress.computed_at_most // BLOCK_TOKENS) > request.progress.registered_blocks
        ]

    def admit(self, request: Computed) -> None:
        """This step computes the request's prompt."""
        self._admitted.append(request)

    def read(self, hosted: Iterable[bytes]) -> None:
        """These contents are read into the pool from now on."""
        self._arriving.update(hosted)

    def has(self, request: Computed, index: int) -> bool:
        """Whether the block of that index, which the pool does not have, is being computed or read for another
        request.
        """
        wanted = request.content(index)
        if wanted in self._arriving:
            return True
        place = self._standing.of(request.share.tenant)
        return any(each.content(index) == wanted for each in self._admitted) or (
            any(index < blocks and each.content(index) == wanted for each, blocks in self._in_flight)
            or any(each.content(index) == wanted for each in self._prompts if self._goes_before(each, place))
        )

    def _goes_before(self, prompt: Computed, place: tuple[float, int]) -> bool:
        return self._standing.of(prompt.share.tenant) <= place
