"""Protects against replayed messages: each number of a session is accepted once."""

WINDOW = 1024
# Why a message was refused; a key of TransferCounters.refused.
REPLAYED_MESSAGE = "replayed_message"


class ReplayWindow:
    """Numbers may come in any order, since large messages take longer; those much older than the newest are refused."""

    def __init__(self) -> None:
        self._newest = 0
        self._accepted: set[int] = set()

    def accept(self, number: int) -> bool:
        """Accept a number. False if it was accepted before, or is too old to tell."""
        if number <= self._newest - WINDOW or number in self._accepted:
            return False
        self._accepted.add(number)
        if number > self._newest:
            self._newest = number
            if len(self._accepted) > 2 * WINDOW:
                self._accepted = {each for each in self._accepted if each > number - WINDOW}
        return True
