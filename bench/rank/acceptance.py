"""How benches are told how many drafts a row has, and how often they count as right."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

# Drafts of a row.
NextN: TypeAlias = int | Literal["auto"]
# Shares of rows whose first draft is right, whose first two are, and so on.
Shares: TypeAlias = tuple[float, ...]
# Defaults: as published for R1, and as of a module that is run again for each guess without being trained for that.
ACCEPTANCE: Sequence[Shares] = ((0.85, 0.72, 0.61), (0.8, 0.4, 0.2))
# What holds until a case sets its own.
NONE_RIGHT: Shares = (0.0,)


def parse_next_n(text: str) -> NextN:
    return "auto" if text == "auto" else int(text)


def parse_shares(text: str) -> Shares:
    return tuple(map(float, text.split(",")))
