"""Names made of two words, for things that a problem must distinguish."""

from random import Random

from eval.tasks.vocabulary import ADJECTIVES, NAMES, NOUNS, PLACES

STARTS = ADJECTIVES + tuple(name.lower() for name in NAMES)
ENDS = NOUNS + PLACES


def different_names(random: Random, count: int, besides: str = "") -> list[str]:
    """`count` different names such as "amber-falcon", none of them `besides`; there are about forty thousand."""
    assert count <= len(STARTS) * len(set(ENDS)) // 2
    names: dict[str, None] = {}
    while len(names) < count:
        name = f"{random.choice(STARTS)}-{random.choice(ENDS)}"
        if name != besides:
            names[name] = None
    return list(names)
