"""Cases that are measured on a node, and their results: lines of a file, so that a run that was cut off can go on."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.rank.acceptance import NextN, Shares
from bench.rank.steps import CONTEXT


@dataclass(frozen=True)
class Case:
    """What identifies a measurement. `requests`: how many a rank that batches has."""

    layout: str
    layers: int
    experts: str
    kv: str
    requests: int
    # Drafts of a row, and the shares of rows whose first drafts are accepted.
    next_n: NextN = 0
    acceptance: Shares = ()


@dataclass(frozen=True)
class Row:
    case: Case
    step_ms: float
    # The floor of bytes and FLOPs at a burst's rates, the same at the rates that a card keeps up, and the exchanges'.
    floor_ms: float
    sustained_floor_ms: float
    wire_ms: float
    idle_share: float
    # Time of a layer with experts in kernels of the exchange, their waits included, and in routed experts alone.
    exchange_us: float
    routed_us: float
    # Time that the host takes to agree on a step with the other ranks, without waiting for them.
    agreement_us: float
    # Tokens a second of prompts of 3,500 tokens that this rank computes while all others compute as many.
    prompt_rate: float
    # Microseconds of a step by group of kernels.
    breakdown: dict[str, float]
    # Tokens that a request gets in a step, and drafts that are verified for them.
    tokens: float = 1.0
    drafts: float = 0.0

    @property
    def ratio(self) -> float:
        return self.step_ms / (self.floor_ms + self.wire_ms)

    @property
    def sustained_ratio(self) -> float:
        return self.step_ms / (self.sustained_floor_ms + self.wire_ms)

    @property
    def request_rate(self) -> float:
        """Tokens a second of one request."""
        return self.tokens / self.step_ms * 1000

    def served(self, output_tokens: int) -> tuple[float, float]:
        """Milliseconds a token and requests a minute of a rank that replaces each request by a new prompt as soon as it
        has its output_tokens. A token's time is its share of a decode step plus its share of the prompts that must be
        computed meanwhile.
        """
        prompt_ms = CONTEXT / self.prompt_rate * 1000
        token_ms = self.step_ms / self.tokens + self.case.requests * prompt_ms / output_tokens
        return token_ms, self.case.requests / (output_tokens * token_ms) * 60_000


def read_rows(path: Path | None) -> list[Row]:
    if path is None or not path.exists():
        return []
    return [_row(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


def _row(found: dict[str, Any]) -> Row:
    case = found["case"]
    acceptance = tuple(case.get("acceptance", ()))
    return Row(**{**found, "case": Case(**{**case, "acceptance": acceptance})})
