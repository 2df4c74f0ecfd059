"""How ranks on several hosts find each other while they load: over keys that their worker's service keeps for them."""

from engine.protocol.messages import Found, LookUp, Publish, ToRank
from engine.rank.link import RankLink
from mesh.errors import EngineFailed


class Rendezvous:
    """One rank's way to all ranks of its worker. Nobody else may receive from the link meanwhile."""

    def __init__(self, link: RankLink) -> None:
        self._link = link

    def publish(self, key: str, value: bytes) -> None:
        self._link.send(Publish(key, value))

    def look_up(self, key: str) -> bytes:
        """What some rank publishes under the key. Raises EngineFailed if the worker ends before."""
        self._link.send(LookUp(key))
        messages: list[ToRank] = []
        while not (messages or self._link.closed):
            messages = self._link.receive(wait=True)
        if not (messages and isinstance(messages[0], Found)):
            raise EngineFailed("the worker ends before its ranks have met")
        return messages[0].value
