"""Random numbers from a key and a counter, in 32-bit integer arithmetic that gives the same bits on any device.

Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", 2011.
"""

import torch

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
WORD = 0xFFFFFFFF

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Four random 32-bit words for four counter words and two key words, each in an int64 tensor of one shape."""
    a, b, c, d = counter
    low, high = key
    for _ in range(ROUNDS):
        # 64-bit products wrap around as signed numbers, but their bits are right, and so is each masked half.
        first, second = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, b = (second >> 32 & WORD) ^ b ^ low, second & WORD
        c, d = (first >> 32 & WORD) ^ d ^ high, first & WORD
        low, high = (low + KEY_STEPS[0]) & WORD, (high + KEY_STEPS[1]) & WORD
    return a, b, c, d


def uniform(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """float64 in the open interval (0, 1), multiples of 2^-33. seed, position: int64, all 64 bits of which are used."""
    none = torch.zeros_like(seed)
    counter = position & WORD, position >> 32 & WORD, none, none
    word, *_ = philox(counter, (seed & WORD, seed >> 32 & WORD))
    return (word.double() + 0.5) / 2.0**32
