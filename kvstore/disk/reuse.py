"""Decides which blocks are worth a place on disk: those that were used again."""

from collections import OrderedDict
from collections.abc import Iterable

from kvstore.keys import Key


class Reuse:
    """Counts uses of the keys seen last, whether or not the store still holds them."""

    def __init__(self, least_uses: int, remembered: int) -> None:
        self._least_uses = least_uses
        # How many keys are remembered.
        self.remembered = remembered
        self._uses: OrderedDict[Key, int] = OrderedDict()

    def stored(self, keys: Iterable[Key]) -> list[Key]:
        """The keys were offered; an offer counts as a use if the key is remembered. Returns the keys that are worth
        writing.
        """
        return [key for key in keys if self._note(key, 1 if key in self._uses else 0)]

    def used(self, keys: Iterable[Key]) -> list[Key]:
        """The keys were fetched. Returns those that are worth writing."""
        return [key for key in keys if self._note(key, 1)]

    def _note(self, key: Key, more: int) -> bool:
        uses = self._uses[key] = self._uses.pop(key, 0) + more
        if len(self._uses) > self.remembered:
            self._uses.popitem(last=False)
        return uses >= self._least_uses
