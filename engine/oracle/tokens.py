"""The oracle's tokens, each a function of its prefix, and the arithmetic of 64-bit words that they are made of.

The KV cell of position p is a rolling hash of tokens 0..p (64 bits). The token at position e is a function of the cell
at e - 1 and of cell e mod 64 of every full block, read through the block ids and weighted by their order. Lost, stale,
misplaced or duplicated KV therefore gives other tokens: at once for a wrong block, within 64 tokens for a wrong cell.

At temperature 0 the token depends on nothing else; above 0 on (seed, e) too. All else of sampling (top_p, top_k, min_p,
penalties, logit_bias) is ignored: a token must say nothing but which KV was read.
"""

from collections.abc import Sequence
from operator import mul

import numpy as np
from numpy.typing import NDArray

from mesh.blocks import BLOCK_TOKENS
from mesh.domain.sampling import Sampling

# The rolling hash is a polynomial in this odd number, so that a chunk is a scaled cumulative sum.
BASE = 0x9E3779B97F4A7C15
INVERSE_BASE = pow(BASE, -1, 2**64)
WORD_MASK = 2**64 - 1
GREEDY = Sampling()

Words = NDArray[np.uint64]
Indices = NDArray[np.int64]


def oracle_tokens(
    prompt_token_ids: Sequence[int], count: int, vocabulary_size: int, sampling: Sampling = GREEDY
) -> list[int]:
    """The `count` tokens that follow a prompt on any undisturbed oracle engine: its definition, without an engine."""
    tokens = list(prompt_token_ids)
    mixed = mix(np.array(tokens, np.uint64)).tolist()
    weights = powers(INVERSE_BASE, (len(tokens) + count) // BLOCK_TOKENS + 1).tolist()
    cells: list[int] = []
    cell = 0
    for position in range(len(tokens) + count):
        if position == len(tokens):
            read = cells[position % BLOCK_TOKENS : position // BLOCK_TOKENS * BLOCK_TOKENS : BLOCK_TOKENS] + cells[-1:]
            state = sum(map(mul, read, weights))
            if sampling.temperature > 0:
                state += _mix_word(sampling.seed ^ _mix_word(position))
            tokens.append(_mix_word(state) % vocabulary_size)
            mixed.append(_mix_word(tokens[-1]))
        cell = (cell * BASE + mixed[position]) % 2**64
        cells.append(cell)
    return tokens[len(prompt_token_ids) :]


def draw_tokens(states: Words, positions: Indices, samplings: Sequence[Sampling], vocabulary_size: int) -> list[int]:
    """The token after each state, uint64 [rows], at its position, as the row samples."""
    if any(sampling.temperature > 0 for sampling in samplings):
        seeds = np.array([sampling.seed for sampling in samplings], np.uint64)
        sampled = np.array([sampling.temperature > 0 for sampling in samplings])
        states = states + np.where(sampled, mix(seeds ^ mix(positions.astype(np.uint64))), np.uint64(0))
    tokens: list[int] = (mix(states) % np.uint64(vocabulary_size)).tolist()
    return tokens


def change_some(tokens: Sequence[int], positions: Indices, share: float, vocabulary_size: int) -> list[int]:
    """This share of the tokens replaced by others: which ones depends on the token and its position."""
    values = np.array(tokens, np.uint64)
    points = (mix(values ^ mix(positions.astype(np.uint64))) >> np.uint64(11)) * 2.0**-53
    changed: list[int] = ((values + (points < share).astype(np.uint64)) % np.uint64(vocabulary_size)).tolist()
    return changed


def powers(base: int, count: int) -> Words:
    """base^0 ... base^(count - 1), modulo 2^64."""
    powers = np.full(count, base, np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, dtype=np.uint64)


def mix(words: Words) -> Words:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014), after its increment."""
    words = words + np.uint64(BASE)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _mix_word(word: int) -> int:
    """`mix` of one word, of any size, modulo 2^64."""
    word = (word + BASE) & WORD_MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD_MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD_MASK
    return word ^ (word >> 31)
