"""An engine without a model, whose tokens prove the KV they were read from.

The KV cell of position p is a rolling hash of tokens 0..p (64 bits). The token at position e is a function of the cell
at e - 1 and of cell e mod 64 of every full block, read through the block ids and weighted by their order. Lost, stale,
misplaced or duplicated KV therefore gives other tokens: at once for a wrong block, within 64 tokens for a wrong cell.

At temperature 0 the token depends on nothing else; above 0 on (seed, e) too. top_p and top_k change nothing.
"""

import time
from collections.abc import Callable, Sequence
from math import log

import numpy as np
from numpy.typing import NDArray

from engine.batch import Batch, Row, Sample
from engine.config import EngineConfig
from engine.messages import KvNamespace, Logprobs, Sampling
from mesh.blocks import BLOCK_TOKENS

DEFAULT_BLOCKS = 16384
# The rolling hash is a polynomial in this odd number, so that a chunk is a scaled cumulative sum.
BASE = 0x9E3779B97F4A7C15
INVERSE_BASE = pow(BASE, -1, 2**64)
GREEDY = Sampling()

Words = NDArray[np.uint64]
Indices = NDArray[np.int64]


def oracle_tokens(
    prompt_token_ids: Sequence[int], count: int, vocabulary_size: int, sampling: Sampling = GREEDY
) -> list[int]:
    """The `count` tokens that follow a prompt on any undisturbed oracle engine: its definition, without an engine."""
    tokens = list(prompt_token_ids)
    cells = np.zeros(len(tokens) + count, np.uint64)
    weights = _powers(INVERSE_BASE, len(cells))
    cell, position = 0, 0
    while len(tokens) < len(cells):
        for mixed in _mix(np.array(tokens[position:], np.uint64)).tolist():
            cell = (cell * BASE + mixed) % 2**64
            cells[position] = cell
            position += 1
        read = [*range(position % BLOCK_TOKENS, position // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS), position - 1]
        state = np.sum(cells[read] * weights[: len(read)], keepdims=True)
        tokens += _draw(state, np.array([position]), [sampling], vocabulary_size)
    return tokens[len(prompt_token_ids) :]


class OracleBackend:
    """The backend of chaos and load tests: exact about KV, at the pace that the configuration sets."""

    eos_token_ids: frozenset[int] = frozenset()

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        oracle = config.oracle
        self.model = config.model_name or oracle.model
        self.vocabulary_size = oracle.vocabulary_size
        self.context_tokens = min(oracle.context_tokens, config.context_tokens or oracle.context_tokens)
        self.total_blocks = config.total_blocks or DEFAULT_BLOCKS
        self.namespace = KvNamespace(
            weights_fingerprint=f"oracle-{oracle.vocabulary_size}", dtype="oracle", layers=1, layout="oracle:1"
        )
        # The KV pool, [total_blocks * 64].
        self.cells: Words = np.zeros(self.total_blocks * BLOCK_TOKENS, np.uint64)
        self._powers = _powers(BASE, config.max_step_tokens)
        # Scale a chunk's tokens, and weigh a prefix's blocks.
        longest = max(config.max_step_tokens, self.context_tokens // BLOCK_TOKENS + 1)
        self._inverse_powers = _powers(INVERSE_BASE, longest)
        self._step_seconds = oracle.step_ms / 1000.0
        self._prefill_tokens_per_second = oracle.prefill_tokens_per_second
        self._clock = clock
        self._sleep = sleep

    def execute(self, batch: Batch) -> list[Sample | None]:
        """One entry per row, None where the row has no sampling. Returns no sooner than the pace allows."""
        started = self._clock()
        rows = batch.rows
        single = next((index for index, row in enumerate(rows) if len(row.token_ids) > 1), len(rows))
        if single:
            self._write_tokens(rows[:single])
        for row in rows[single:]:
            self._write_chunk(row)
        samples = self._samples(rows)
        remaining = self._pace(rows, single) - (self._clock() - started)
        if remaining > 0:
            self._sleep(remaining)
        return samples

    def _pace(self, rows: Sequence[Row], single: int) -> float:
        """Seconds this step takes: a decode step where there are rows of one token, and the time of the chunks."""
        seconds = self._step_seconds if single else 0.0
        if self._prefill_tokens_per_second:
            seconds += sum(len(row.token_ids) for row in rows[single:]) / self._prefill_tokens_per_second
        return seconds

    def _write_tokens(self, rows: Sequence[Row]) -> None:
        """Rows of one token, all at once."""
        starts = np.array([row.start for row in rows])
        before = np.array([row.block_ids[(row.start - 1) // BLOCK_TOKENS] if row.start else 0 for row in rows])
        here = np.array([row.block_ids[row.start // BLOCK_TOKENS] for row in rows])
        previous = np.where(starts > 0, self.cells[before * BLOCK_TOKENS + (starts - 1) % BLOCK_TOKENS], np.uint64(0))
        mixed = _mix(np.array([row.token_ids[0] for row in rows], np.uint64))
        self.cells[here * BLOCK_TOKENS + starts % BLOCK_TOKENS] = previous * np.uint64(BASE) + mixed

    def _write_chunk(self, row: Row) -> None:
        count = len(row.token_ids)
        positions = np.arange(row.start, row.end)
        cells = np.array(row.block_ids)[positions // BLOCK_TOKENS] * BLOCK_TOKENS + positions % BLOCK_TOKENS
        scaled = _mix(np.array(row.token_ids, np.uint64)) * self._inverse_powers[:count]
        if row.start:
            previous = row.start - 1
            carry = self.cells[[row.block_ids[previous // BLOCK_TOKENS] * BLOCK_TOKENS + previous % BLOCK_TOKENS]]
            scaled[:1] += carry * np.uint64(BASE)
        self.cells[cells] = np.cumsum(scaled) * self._powers[:count]

    def _samples(self, rows: Sequence[Row]) -> list[Sample | None]:
        samples: list[Sample | None] = [None] * len(rows)
        drawing = [(index, row, row.sampling) for index, row in enumerate(rows) if row.sampling is not None]
        if not drawing:
            return samples
        ends = np.array([row.end for _, row, _ in drawing])
        states = self._read([row for _, row, _ in drawing], ends)
        tokens = _draw(states, ends, [sampling for _, _, sampling in drawing], self.vocabulary_size)
        for (index, _, sampling), token in zip(drawing, tokens, strict=True):
            samples[index] = Sample(token, _logprobs(token, sampling.top_logprobs, self.vocabulary_size))
        return samples

    def _read(self, rows: Sequence[Row], ends: Indices) -> Words:
        """The state that each row's token is drawn from: one cell of each full block and the last, weighted."""
        counts = ends // BLOCK_TOKENS + 1
        last = np.cumsum(counts) - 1
        order = np.arange(last[-1] + 1) - np.repeat(last + 1 - counts, counts)
        positions = order * BLOCK_TOKENS + np.repeat(ends % BLOCK_TOKENS, counts)
        positions[last] = ends - 1
        lengths = np.array([len(row.block_ids) for row in rows])
        table = np.concatenate([row.block_ids for row in rows])
        blocks = table[np.repeat(np.cumsum(lengths) - lengths, counts) + positions // BLOCK_TOKENS]
        cells = self.cells[blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS]
        return np.add.reduceat(cells * self._inverse_powers[order], last + 1 - counts)


def _powers(base: int, count: int) -> Words:
    """base^0 ... base^(count - 1), modulo 2^64."""
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, dtype=np.uint64)


def _mix(words: Words) -> Words:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014), after its increment."""
    words = words + np.uint64(BASE)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _draw(states: Words, positions: Indices, samplings: Sequence[Sampling], vocabulary_size: int) -> list[int]:
    if any(sampling.temperature > 0 for sampling in samplings):
        seeds = np.array([sampling.seed for sampling in samplings], np.uint64)
        sampled = np.array([sampling.temperature > 0 for sampling in samplings])
        states = states + np.where(sampled, _mix(seeds ^ _mix(positions.astype(np.uint64))), np.uint64(0))
    tokens: list[int] = (_mix(states) % np.uint64(vocabulary_size)).tolist()
    return tokens


def _logprobs(token_id: int, alternatives: int | None, vocabulary_size: int) -> Logprobs | None:
    """A fixed distribution: the token drawn has probability 1/2, the ids after it 1/4, 1/8, ..."""
    if alternatives is None:
        return None
    top = [(token_id + rank) % vocabulary_size for rank in range(min(alternatives, vocabulary_size))]
    return Logprobs(-log(2), top, [-log(2) * (rank + 1) for rank in range(len(top))])
