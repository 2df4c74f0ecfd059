"""A random number from a key and a counter, in 32-bit integer arithmetic that any device repeats bit for bit.

Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
"""

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Four random 32-bit words for four counter words and two key words."""
    a, b, c, d = counter
    low, high = key
    for _ in range(ROUNDS):
        first, second = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b, c, d = (second >> 32) ^ b ^ low, second & WORD, (first >> 32) ^ d ^ high, first & WORD
        low, high = (low + KEY_STEPS[0]) & WORD, (high + KEY_STEPS[1]) & WORD
    return a, b, c, d


def uniform(seed: int, position: int) -> float:
    """In the open interval (0, 1), a multiple of 2^-33. Only the low 64 bits of seed and position count."""
    word, *_ = philox((position & WORD, position >> 32 & WORD, 0, 0), (seed & WORD, seed >> 32 & WORD))
    return (word + 0.5) / 2.0**32
