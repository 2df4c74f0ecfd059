"""An engine without a model, whose tokens prove the KV they were read from (engine/oracle/tokens.py).

Its drafts are the tokens that it would draw, some of them changed. Which ones depends on the position and the token.
"""

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from math import log

import numpy as np
import psutil

from engine.balance.report import BalanceReport
from engine.batch import Batch, Row, Sample, with_known_tokens
from engine.config import EngineConfig
from engine.drafts.config import MOST_DRAFTS
from engine.memory.room import check_room, host_slots
from engine.moves.host_slots import HostSlots, PlainSlots
from engine.oracle.tokens import BASE, INVERSE_BASE, Indices, Words, change_some, draw_tokens, mix, powers
from engine.pace.step_times import StepTimes
from engine.protocol.messages import SparseMeasure
from engine.requests.thinking import ThinkTokens
from engine.step.shape import StepShape
from mesh.blocks import BLOCK_TOKENS
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.outputs import Logprobs, PromptLogprobs
from mesh.domain.sampling import Sampling
from mesh.domain.workers import PromptPace, WorkerSpeed
from transfer.host_memory import HostMemory
from transfer.memory import Pool

DEFAULT_BLOCKS = 16384
# Shifts and masks cost numpy a quarter of what division does.
BLOCK_SHIFT = BLOCK_TOKENS.bit_length() - 1
BLOCK_MASK = BLOCK_TOKENS - 1


class OracleBackend:
    """The backend of chaos and load tests: exact about KV, at the pace that the configuration sets."""

    eos_token_ids: frozenset[int] = frozenset()
    asynchronous = False
    captured_rows = captured_prompt_tokens = 0
    device_name = "oracle"
    draft_layers = 0
    think_tokens: ThinkTokens | None = None
    step_times: StepTimes | None = None
    balance: BalanceReport | None = None

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        oracle = config.oracle
        self._config = config
        self.model = config.model_name or oracle.model
        self.vocabulary_size = oracle.vocabulary_size
        self.context_tokens = min(oracle.context_tokens, config.context_tokens or oracle.context_tokens)
        self.total_blocks = config.total_blocks or DEFAULT_BLOCKS
        self.namespace = KvNamespace(
            weights_fingerprint=f"oracle-{oracle.vocabulary_size}", dtype="oracle", layers=1, layout="oracle:1"
        )
        self.block_bytes = BLOCK_TOKENS * 8
        check_room(self.total_blocks, self.block_bytes, psutil.virtual_memory().available)
        # The KV, [total_blocks * 64].
        self.cells: Words = np.zeros(self.total_blocks * BLOCK_TOKENS, np.uint64)
        self._powers = powers(BASE, config.max_step_tokens)
        # Inverse powers scale a chunk's tokens, and weight a prefix's blocks.
        longest = max(config.max_step_tokens, (self.context_tokens + MOST_DRAFTS) // BLOCK_TOKENS + 1)
        self._inverse_powers = powers(INVERSE_BASE, longest)
        self.speed = _speed(config)
        self._step_seconds = oracle.step_ms / 1000.0
        self._prefill_tokens_per_second = oracle.prefill_tokens_per_second
        self._clock = clock
        self._sleep = sleep
        self._draft_accuracy = oracle.draft_accuracy
        # The batch launched last, and what it drew.
        self._rows: Sequence[Row] = []
        self._samples: list[Sample | None] = []

    def kv_memory(self) -> HostMemory:
        return HostMemory(self.pool)

    def host_slots(self) -> HostSlots | None:
        return host_slots(self._config, "oracle", self.block_bytes, partial(PlainSlots, [self.pool]))

    @property
    def pool(self) -> Pool:
        """The KV as bytes: one layer."""
        return self.cells.view(np.uint8).reshape(1, self.total_blocks, self.block_bytes)

    def clear_drafts(self, block_ids: Sequence[int]) -> None:
        """There are no draft layers."""

    def drain_sparse_measures(self) -> Sequence[SparseMeasure]:
        """There is no attention."""
        return ()

    def launch(self, batch: Batch, shape: StepShape) -> "OracleStep":
        """Writes the tokens' KV right away; a dummy computes nothing, in no time."""
        started = self._clock()
        rows = with_known_tokens(batch.rows, self._rows, self._samples)
        decoding = next((index for index, row in enumerate(rows) if not row.decodes), len(rows))
        layout = _Layout(rows)
        if decoding:
            self._write_decoding(rows[:decoding], layout)
        for index in range(decoding, len(rows)):
            self._write_chunk(rows[index], index, layout)
        self._rows = batch.rows
        draw = partial(self._draw, rows, layout, shape.drafts, started + self._pace(rows, decoding))
        return OracleStep(draw, _prompt_logprobs(rows, self.vocabulary_size))

    def _draw(self, rows: Sequence[Row], layout: "_Layout", drafts: int, ends: float) -> list[Sample | None]:
        """Returns no sooner than the pace allows: at `ends` by the clock."""
        self._samples = self._draw_samples(rows, layout, drafts)
        remaining = ends - self._clock()
        if remaining > 0:
            self._sleep(remaining)
        return self._samples

    def _pace(self, rows: Sequence[Row], decoding: int) -> float:
        """Seconds this step takes: a decode step if there are rows that decode, and the time of the chunks."""
        seconds = self._step_seconds if decoding else 0.0
        if self._prefill_tokens_per_second:
            seconds += sum(len(row.token_ids) for row in rows[decoding:]) / self._prefill_tokens_per_second
        return seconds

    def _write_decoding(self, rows: Sequence[Row], layout: "_Layout") -> None:
        """Write rows of one token and its drafts, which come first in a batch: the first token of all, the second..."""
        for column in range(max(len(row.token_ids) for row in rows)):
            which = np.array([index for index, row in enumerate(rows) if len(row.token_ids) > column])
            positions = layout.starts[which] + column
            previous = self.cells[layout.cells(which, np.maximum(positions - 1, 0))] * (positions > 0)
            mixed = mix(np.array([rows[index].token_ids[column] for index in which], np.uint64))
            self.cells[layout.cells(which, positions)] = previous * np.uint64(BASE) + mixed

    def _write_chunk(self, row: Row, index: int, layout: "_Layout") -> None:
        count = len(row.token_ids)
        scaled = mix(np.array(row.token_ids, np.uint64)) * self._inverse_powers[:count]
        which = np.array([index])
        if row.start:
            scaled[:1] += self.cells[layout.cells(which, np.array([row.start - 1]))] * np.uint64(BASE)
        self.cells[layout.cells(which, np.arange(row.start, row.end))] = np.cumsum(scaled) * self._powers[:count]

    def _draw_samples(self, rows: Sequence[Row], layout: "_Layout", drafts: int) -> list[Sample | None]:
        samples: list[Sample | None] = [None] * len(rows)
        drawing = [index for index, row in enumerate(rows) if row.sampling is not None]
        if not drawing:
            return samples
        # A row draws after its last token that is no draft, and after each draft.
        which = [index for index in drawing for _ in range(rows[index].draws)]
        ends = np.array([rows[index].end - left for index in drawing for left in range(rows[index].drafts, -1, -1)])
        samplings = [_sampling(rows[index]) for index in which]
        drawn = iter(draw_tokens(self._read(np.array(which), ends, layout), ends, samplings, self.vocabulary_size))
        yielded = {index: _yielded(rows[index], list(islice(drawn, rows[index].draws))) for index in drawing}
        guesses = self._guess(rows, yielded, drafts, layout)
        for index, token_ids in yielded.items():
            logprobs = _logprobs(token_ids, _sampling(rows[index]).top_logprobs, self.vocabulary_size)
            samples[index] = Sample(token_ids, logprobs, guesses[index])
        return samples

    def _guess(
        self, rows: Sequence[Row], yielded: Mapping[int, Sequence[int]], drafts: int, layout: "_Layout"
    ) -> Mapping[int, Sequence[int]]:
        """By row, the tokens that will be drawn after the yielded ones, some of them changed."""
        if not drafts:
            return dict.fromkeys(yielded, ())
        which, samplings = np.array(list(yielded)), [_sampling(rows[index]) for index in yielded]
        # Position of the last token of each row; its cell is not written yet.
        positions = layout.ends[which] + [len(tokens) - 1 - rows[index].drafts for index, tokens in yielded.items()]
        cells = self.cells[layout.cells(which, positions - 1)]
        tokens = [tokens[-1] for tokens in yielded.values()]
        columns = []
        for _ in range(drafts):
            cells = cells * np.uint64(BASE) + mix(np.array(tokens, np.uint64))
            positions = positions + 1
            tokens = draw_tokens(
                self._read(which, positions, layout, cells), positions, samplings, self.vocabulary_size
            )
            columns.append(change_some(tokens, positions, 1.0 - self._draft_accuracy, self.vocabulary_size))
        return dict(zip(yielded, zip(*columns, strict=True), strict=True))

    def _read(self, which: Indices, ends: Indices, layout: "_Layout", last_cells: Words | None = None) -> Words:
        """The state that each row's token is drawn from: one cell of each full block and the last, weighted.

        last_cells: used in place of the cells of the last tokens, which are not written yet.
        """
        counts = (ends >> BLOCK_SHIFT) + 1
        last = np.cumsum(counts) - 1
        order = np.arange(last[-1] + 1) - np.repeat(last + 1 - counts, counts)
        positions = (order << BLOCK_SHIFT) + np.repeat(ends & BLOCK_MASK, counts)
        positions[last] = ends - 1 if last_cells is None else 0
        cells = self.cells[layout.cells(np.repeat(which, counts), positions)]
        if last_cells is not None:
            cells[last] = last_cells
        return np.add.reduceat(cells * self._inverse_powers[order], last + 1 - counts)


def _speed(config: EngineConfig) -> WorkerSpeed | None:
    """As configured; None if steps or prompts are as fast as possible."""
    oracle = config.oracle
    if not oracle.step_ms or not oracle.prefill_tokens_per_second:
        return None
    return WorkerSpeed(oracle.step_ms, float(config.max_requests), PromptPace(oracle.prefill_tokens_per_second))


class OracleStep:
    """An `engine.backend.Launched`: the KV of its rows is written already."""

    def __init__(self, draw: Callable[[], list[Sample | None]], prompt_logprobs: Mapping[int, PromptLogprobs]) -> None:
        self._draw = draw
        self._prompt_logprobs = prompt_logprobs
        self._samples: list[Sample | None] = []

    def draw(self) -> None:
        self._samples = self._draw()

    def collect(self) -> list[Sample | None]:
        return self._samples

    def prompt_logprobs(self) -> Mapping[int, PromptLogprobs]:
        return self._prompt_logprobs


class _Layout:
    """Where the rows of a batch lie: their first positions and ends, int64 [rows], and their cells."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.starts: Indices = np.array([row.start for row in rows], np.int64)
        self.ends: Indices = self.starts + np.array([len(row.token_ids) for row in rows], np.int64)
        # All rows' block ids, one after the other.
        blocks = array("i")
        for row in rows:
            blocks.extend(row.block_ids)
        self._blocks = np.frombuffer(blocks, np.int32).astype(np.int64)
        lengths = np.array([len(row.block_ids) for row in rows], np.int64)
        self._offsets = np.cumsum(lengths) - lengths

    def cells(self, which: Indices, positions: Indices) -> Indices:
        """Indices into OracleBackend.cells: for each pair of a row in `which` and a position."""
        blocks = self._blocks[self._offsets[which] + (positions >> BLOCK_SHIFT)]
        cells: Indices = (blocks << BLOCK_SHIFT) + (positions & BLOCK_MASK)
        return cells


def _yielded(row: Row, drawn: Sequence[int]) -> Sequence[int]:
    """The drawn tokens up to and including the first that differs from its draft."""
    guesses = row.token_ids[len(row.token_ids) - row.drafts :]
    accepted = next((index for index in range(row.drafts) if guesses[index] != drawn[index]), row.drafts)
    return drawn[: accepted + 1]


def _logprobs(token_ids: Sequence[int], alternatives: int | None, vocabulary_size: int) -> list[Logprobs] | None:
    """A fixed distribution: the token drawn has probability 1/2, the ids after it 1/4, 1/8, ..."""
    if alternatives is None:
        return None
    count = min(alternatives, vocabulary_size)
    tops = [[(token_id + rank) % vocabulary_size for rank in range(count)] for token_id in token_ids]
    return [Logprobs(-log(2), top, [-log(2) * (rank + 1) for rank in range(count)]) for top in tops]


def _prompt_logprobs(rows: Sequence[Row], vocabulary_size: int) -> Mapping[int, PromptLogprobs]:
    """By row, the same distribution as for drawn tokens: the prompt's token has 1/2, the ids after it 1/4, 1/8, ..."""
    found = {}
    for index, row in enumerate(rows):
        if row.prompt_logprobs is None:
            continue
        tokens = np.array([*row.token_ids, *(() if row.next_token is None else (row.next_token,))][1:], np.int64)
        places = np.arange(min(row.prompt_logprobs, vocabulary_size))
        tops = ((tokens[:, None] + places) % vocabulary_size).astype(np.uint32)
        top = np.broadcast_to((-log(2) * (places + 1)).astype(np.float32), tops.shape)
        own, ranks = np.full(len(tokens), -log(2), np.float32), np.ones(len(tokens), np.uint32)
        found[index] = PromptLogprobs(len(places), own.tobytes(), ranks.tobytes(), tops.tobytes(), top.tobytes())
    return found


def _sampling(row: Row) -> Sampling:
    assert row.sampling is not None
    return row.sampling
