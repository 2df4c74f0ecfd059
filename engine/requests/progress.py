"""The progress of one request: its tokens, computed KV and blocks."""

from array import array
from collections.abc import Sequence

from mesh.blocks import BLOCK_TOKENS


class Progress:
    """Tokens, KV and blocks of one request. Written by its methods alone; everybody else reads.

    A row in flight that draws yields one token or more; how many is known only when its step is collected. So what is
    confirmed is kept apart from the most that can come: steps are planned and blocks are held for the most, while
    requests end and their blocks become reusable by what is confirmed. Always

        len(token_ids) <= tokens_at_least <= tokens_at_most
        computed <= computed_at_most <= covered

    and without rows in flight what is confirmed, at least and at most is the same. A row that draws computes the KV of
    all tokens before the last that it yields: `computed_at_most` is then one less than `tokens_at_most`.

    Attributes:
        token_ids: the prompt, then what was generated.
        tokens_at_least, tokens_at_most: `token_ids`, and those that rows in flight yield.
        rewind: how many tokens are computed again at the end of KV that no row of this request computed: one for each
            module that drafts. Drafts need the hidden state of a token, which is there only while it is computed.
        known: tokens whose KV no row of this request computed; it is not written again.
        computed: leading tokens whose KV is written, by collected steps or by transfers, without those computed again.
        computed_at_most: the same with all that rows in flight write.
        rows_in_flight: how many rows of steps that are not collected belong to the request.
        drawing_row: if tokens are in flight, this row of the step launched last draws the latest.
        guesses_in_flight: the row of that token guesses at least this many more.
        drafts: guesses of the tokens after `token_ids`, for a row that follows none in flight.
        block_ids: the block table, in order of position, 64 tokens a block; an array, so that backends can read it as a
            buffer. Empty while the request waits.
        covered: tokens that the block table has room for.
        registered_blocks: how many leading blocks of the table were matched in the pool or registered with it.
        drafts_end: index of the first block of the table whose draft layers are not whole, since part of the KV came
            without draft layers. Tokens are right all the same; only guesses after it are not as good. None if all
            are whole.
    """

    __slots__ = (
        "block_ids",
        "computed",
        "computed_at_most",
        "covered",
        "drafts",
        "drafts_end",
        "drawing_row",
        "guesses_in_flight",
        "known",
        "registered_blocks",
        "rewind",
        "rows_in_flight",
        "token_ids",
        "tokens_at_least",
        "tokens_at_most",
    )

    def __init__(self, token_ids: Sequence[int], rewind: int = 0) -> None:
        self.token_ids = list(token_ids)
        self.rewind = rewind
        self.tokens_at_least = self.tokens_at_most = len(self.token_ids)
        self.rows_in_flight = 0
        self.drawing_row: int | None = None
        self.guesses_in_flight = 0
        self.drafts: Sequence[int] = ()
        self.drafts_end: int | None = None
        self._forget()

    @property
    def left(self) -> int:
        """Tokens to compute before the next one can be drawn: 1 while the request decodes."""
        return self.tokens_at_most - self.computed_at_most

    @property
    def begun(self) -> bool:
        """Whether a row of this request, in flight or collected, has computed any token."""
        return self.computed_at_most > max(self.known - self.rewind, 0)

    def lack_drafts(self, first_block: int) -> None:
        """Draft layers are not whole from this block on: its KV, or KV before it, came without them."""
        self.drafts_end = first_block if self.drafts_end is None else min(first_block, self.drafts_end)

    def matched(self, cached: Sequence[int], new: Sequence[int]) -> None:
        """The request holds blocks for all its tokens: `cached` has the KV of the leading ones, `new` is empty."""
        assert not self.block_ids and not self.rows_in_flight
        self.grown(cached)
        self.grown(new)
        self.registered_blocks = len(cached)
        self.known = len(cached) * BLOCK_TOKENS
        self.computed = self.computed_at_most = max(self.known - self.rewind, 0)
        assert self.computed < len(self.token_ids) <= self.covered

    def grown(self, blocks: Sequence[int]) -> None:
        """The request holds more blocks, for tokens that it generates."""
        self.block_ids.extend(blocks)
        self.covered = len(self.block_ids) * BLOCK_TOKENS

    def registered(self, blocks: int) -> None:
        """Others can find the first `blocks` blocks, which are full."""
        assert blocks * BLOCK_TOKENS <= self.computed + self.rewind
        self.registered_blocks = blocks

    def landed(self, tokens: int) -> None:
        """Transfers have written the KV of the first `tokens` tokens."""
        assert not self.rows_in_flight
        assert self.computed <= tokens <= min(len(self.token_ids), self.covered)
        self.known = tokens
        self.computed = self.computed_at_most = max(tokens - self.rewind, 0)

    def received(self, token_ids: Sequence[int]) -> None:
        """Another worker drew the next tokens."""
        assert not self.rows_in_flight
        self.token_ids.extend(token_ids)
        self.tokens_at_least = self.tokens_at_most = len(self.token_ids)

    def launched(self, computes: int, draws: int, index: int, guesses: int = 0) -> None:
        """A step is in flight whose row `index` computes at most `computes` tokens, draws at most `draws`, and guesses
        `guesses` tokens after those that it draws.

        A row that draws n tokens at most computes n - 1 drafts in addition to the tokens that are known or in flight.
        """
        self.rows_in_flight += 1
        self.computed_at_most += computes
        if draws:
            self.tokens_at_least += 1
            self.tokens_at_most += draws
            self.drawing_row = index
            self.guesses_in_flight = guesses
        assert self.computed_at_most <= self.covered

    def committed(self, computes: int, draws: int, token_ids: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """The earliest row in flight, which was launched with these bounds, has yielded these tokens and guesses.

        There are no tokens if the row drew none, or if its request has ended.
        """
        self.rows_in_flight -= 1
        self.computed += computes
        if not draws:
            return
        self.token_ids += token_ids
        self.drafts = drafts
        tokens = len(token_ids)
        if tokens != 1:
            self.tokens_at_least += tokens - 1
        if tokens != draws:
            missing = draws - tokens
            self.tokens_at_most -= missing
            self.computed -= missing
            self.computed_at_most -= missing

    def drew(self, token_ids: Sequence[int], index: int) -> None:
        """One step after the other was launched and collected, and row `index` of each drew one of these tokens."""
        assert not self.rows_in_flight
        tokens = len(token_ids)
        self.token_ids += token_ids
        self.tokens_at_least += tokens
        self.tokens_at_most += tokens
        self.computed += tokens
        self.computed_at_most += tokens
        self.drawing_row, self.guesses_in_flight, self.drafts = index, 0, ()
        assert self.computed_at_most <= self.covered

    def reset(self) -> None:
        """The request holds no block and nothing is computed; tokens stay."""
        assert not self.rows_in_flight
        self._forget()

    def _forget(self) -> None:
        self.block_ids = array("i")
        self.drafts = ()
        self.covered = 0
        self.computed = self.computed_at_most = 0
        self.registered_blocks = 0
        self.known = 0
        self.drafts_end = None
