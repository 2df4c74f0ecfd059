"""How long past uses keep a block in host memory, learnt from the blocks that come again after they were evicted."""

from collections import OrderedDict

# In turnovers, in each of which as many blocks come as there are slots.
FIRST, LEAST, MOST = 0.25, 1 / 32, 1.0
# The fewest uses of a block that counts as used often.
OFTEN = 3


class UseWorth:
    """Blocks of a session that have many uses have none ahead: the session has ended. Of documents that requests
    ask about, those with many uses have the most. So the worth of a use grows while blocks that were used often come
    again after their eviction more probably than others, and shrinks while they do so less (compare the ghost lists of
    ARC; Megiddo and Modha 2003).

    Attributes:
        turnovers: how many turnovers later a block is evicted for each of its uses.
    """

    def __init__(self) -> None:
        self.turnovers = FIRST
        # Evicted contents, the earliest first, and the uses of each.
        self._evicted: OrderedDict[bytes, int] = OrderedDict()
        # How many blocks were evicted, and how many came again, by whether they had been used often. Older ones count
        # less.
        self._gone, self._back = [0.0, 0.0], [0.0, 0.0]

    def evicted(self, content: bytes, uses: int, most: int) -> None:
        """most: how many evicted contents are remembered."""
        self._gone[uses >= OFTEN] += 1
        self._evicted[content] = uses
        while len(self._evicted) > most:
            self._evicted.popitem(last=False)

    def came(self, content: bytes) -> int:
        """How often the content had been used before it was evicted; 0 if nothing is known of it."""
        uses = self._evicted.pop(content, 0)
        if uses:
            self._back[uses >= OFTEN] += 1
        return uses

    def end_turnover(self) -> None:
        seldom, often = (back / gone if gone else 0.0 for back, gone in zip(self._back, self._gone, strict=True))
        if often > seldom:
            self.turnovers = min(2 * self.turnovers, MOST)
        elif often < seldom:
            self.turnovers = max(self.turnovers / 2, LEAST)
        self._gone, self._back = ([count / 2 for count in counts] for counts in (self._gone, self._back))
