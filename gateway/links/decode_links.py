"""The links to all decode workers; each is made for its worker's first request."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count

from gateway.config import DispatchConfig
from gateway.generation import Generation
from gateway.links.decode_link import DecodeLink, GatewayIdentity
from mesh.domain.placement import Placement
from mesh.domain.targets import WorkerTarget
from mesh.rpc.channel import Channels


@dataclass(frozen=True, slots=True)
class LinkStream:
    """One attempt of a request on a link."""

    link: DecodeLink
    stream_id: int

    def cancel(self) -> None:
        self.link.cancel(self.stream_id)


class DecodeLinks:
    def __init__(
        self, identity: GatewayIdentity, config: DispatchConfig, channels: Channels, clock: Callable[[], float]
    ) -> None:
        self._identity = identity
        self._config = config
        self._channels = channels
        self._clock = clock
        self._links: dict[str, DecodeLink] = {}
        # Incarnations in the last snapshot. The scheduler may place a request on a worker before any snapshot lists it:
        # such a worker has not lost its lease.
        self._leased: dict[str, str] = {}
        # Stream ids are never reused while this gateway lives, for any worker or attempt.
        self._stream_ids = count(1)

    def submit(self, placement: Placement, attempt: int, generation: Generation) -> LinkStream:
        """Ask the placed worker to continue `generation`; never waits."""
        link = self._link(placement.decode)
        stream_id = next(self._stream_ids)
        link.submit(stream_id, attempt, placement, generation)
        return LinkStream(link, stream_id)

    def retain(self, incarnations: Mapping[str, str]) -> None:
        """Drop the links to workers that lost their lease; `incarnations` are those that have one, by worker id."""
        for worker_id, link in list(self._links.items()):
            known = self._leased.get(worker_id) == link.target.incarnation
            if known and incarnations.get(worker_id) != link.target.incarnation:
                self._drop(link, "its lease ended")
        self._leased = dict(incarnations)

    def live_streams(self) -> dict[str, int]:
        """Requests on each worker, by worker id."""
        return {worker_id: link.live_streams for worker_id, link in self._links.items()}

    async def close(self) -> None:
        links, self._links = self._links, {}
        for link in links.values():
            await link.close()

    def _link(self, target: WorkerTarget) -> DecodeLink:
        link = self._links.get(target.worker_id)
        if link is not None and link.open and link.target == target:
            return link
        if link is not None:
            self._drop(link, "it was placed as another incarnation")
        link = DecodeLink(target, self._identity, self._config, self._channels, self._clock)
        self._links[target.worker_id] = link
        return link

    def _drop(self, link: DecodeLink, why: str) -> None:
        del self._links[link.target.worker_id]
        link.lose(why)
        link.leave()
