"""Protection against replayed messages: each number of a session is taken once."""

WINDOW = 1024
# Why a message was refused; a key of TransferCounters.refused.
REPLAYED_MESSAGE = "replayed_message"


class ReplayWindow:
    """Numbers may come in any order, as large messages take longer; those far behind the newest are refused."""

    def __init__(self) -> None:
        self._newest = 0
        self._taken: set[int] = set()

    def take(self, number: int) -> bool:
        """False for a number that was taken before, or is too old to tell."""
        if number <= self._newest - WINDOW or number in self._taken:
            return False
        self._taken.add(number)
        if number > self._newest:
            self._newest = number
            if len(self._taken) > 2 * WINDOW:
                self._taken = {taken for taken in self._taken if taken > number - WINDOW}
        return True
