"""KV that came without the draft layers that this rank has."""

from collections.abc import Callable, Sequence

from engine.progress import Progress


class DraftParts:
    """Without their draft layers blocks serve as well, since guesses change no token: these only get worse."""

    def __init__(self, clear: Callable[[Sequence[int]], None]) -> None:
        """clear: empties the draft layers of blocks, which hold what another request left there."""
        self._clear = clear

    def lacking(self, progress: Progress, first_block: int, block_ids: Sequence[int]) -> None:
        """Base layers alone came to these blocks, the first of which is so many blocks into the request's table."""
        if block_ids:
            self._clear(block_ids)
            progress.lack_drafts(first_block)
