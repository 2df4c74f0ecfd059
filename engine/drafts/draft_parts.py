"""KV that came without the draft layers that this rank has."""

from collections.abc import Callable, Sequence

from engine.requests.progress import Progress


class DraftParts:
    """Blocks serve as well without their draft layers, since guesses change no token: only the guesses get worse."""

    def __init__(self, clear: Callable[[Sequence[int]], None]) -> None:
        """clear: empties the draft layers of blocks, which hold what another request left there."""
        self._clear = clear

    def lacking(self, progress: Progress, first_block: int, block_ids: Sequence[int]) -> None:
        """Only base layers came to these blocks, the first of which is block `first_block` of the request's table."""
        if block_ids:
            self._clear(block_ids)
            progress.lack_drafts(first_block)
