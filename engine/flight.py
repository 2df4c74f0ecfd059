"""A step under way: launched, and not collected."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.batch import Launched, Row
from engine.request import Request


@dataclass(frozen=True, slots=True)
class Flight:
    """What the engine needs to know of a launched step when its samples come."""

    requests: Sequence[Request]
    # One a request.
    rows: Sequence[Row]
    launched: Launched
    # Seconds of the engine's clock.
    started: float
    decoding: int
    prompt_tokens: int
