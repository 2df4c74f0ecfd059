"""Divides the GPUs of one machine among workers: `deepmesh up --gpus 4 --split 1P+1D`. Pure."""

import re
from dataclasses import dataclass

from mesh.errors import ConfigError

# The default: prompts and answers on the same GPUs.
IN_FLIGHT = "1D"
_SPLIT = re.compile(r"(?:(?P<P>\d{1,3})P(?:x(?P<Px>\d{1,3}))?\+)?(?P<D>\d{1,3})D(?:x(?P<Dx>\d{1,3}))?")


@dataclass(frozen=True)
class Split:
    """How many workers each role has, and how many ranks each of those workers has."""

    decode_workers: int
    decode_ranks: int
    prefill_workers: int = 0
    prefill_ranks: int = 0


def read_split(split: str, word: str = "--split ") -> tuple[dict[str, int], dict[str, int]]:
    """How many prefill (P) and decode (D) workers a split asks for, and how many GPUs each has, where it says so.

    `word`: how the user says it. Raises ConfigError.
    """
    found = _SPLIT.fullmatch(split)
    counts = {role: int(found[role] or 0) for role in "PD"} if found else {}
    if found is None or not counts["D"]:
        raise ConfigError(f"{word}{split}: expected how many workers of each role, as in 1D, 1P+1D or 1Px2+1Dx6")
    return counts, {role: int(found[f"{role}x"]) for role in "PD" if found[f"{role}x"] is not None}


def split_gpus(gpus: int, split: str, words: tuple[str, str] = ("--gpus ", "--split ")) -> Split:
    """Divide `gpus` GPUs as `split` says: 1D, 1P+1D, 2P+1D, or with the number of GPUs of each worker 2Px1+1Dx2.

    Workers without a given number of GPUs get equal parts of the rest. `words`: how the user says the two. Raises
    ConfigError.
    """
    counts, sizes = read_split(split, words[1])
    rest = gpus - sum(counts[role] * size for role, size in sizes.items())
    takers = sum(counts[role] for role in "PD" if role not in sizes)
    if 0 in sizes.values() or (rest if not takers else rest < takers or rest % takers):
        raise ConfigError(
            f"{words[1]}{split} does not divide {words[0]}{gpus}: give numbers that do, or the GPUs of each worker, "
            "as in 1Px2+1Dx6"
        )
    each = {role: sizes.get(role, rest // takers if takers else 0) for role in "PD"}
    return Split(counts["D"], each["D"], counts["P"], each["P"] if counts["P"] else 0)
