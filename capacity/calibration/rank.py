"""A cost file from what `bench.rank` measured of one GPU's engine (its rank.json)."""

from pathlib import Path

import msgspec

from capacity.calibration.fit import left_out_error
from mesh.cost_file import CostFile
from mesh.costs import MILLION, CostModel
from mesh.errors import ConfigError

# The context and the number of traced prompts of bench.rank.
CONTEXT_TOKENS = 3500
TRACED_PROMPTS = 5
ATTENTION = "attention"


class _Decode(msgspec.Struct):
    requests: int
    step_ms: float
    # Microseconds a step, by group of kernels.
    breakdown: dict[str, float]


class _Prefill(msgspec.Struct):
    tokens_per_second: float
    # Milliseconds of the traced prompts.
    breakdown: dict[str, float]


class _Report(msgspec.Struct):
    shape: str
    kv: str
    experts: str
    device: str
    decode: list[_Decode]
    prefill: _Prefill | None = None


def costs_of_rank(path: Path, defaults: CostModel | None = None) -> CostFile:
    """What bench.rank does not measure (pushes, fetches, calls, starts) is as in `defaults`. Raises ConfigError."""
    try:
        report = msgspec.json.decode(path.read_bytes(), type=_Report)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no report of bench.rank: {error}") from error
    if not report.decode:
        raise ConfigError(f"{path} has no decode steps: run bench.rank with --requests")
    points = tuple(sorted((float(row.requests), row.step_ms) for row in report.decode))
    costs = msgspec.structs.replace(
        defaults or CostModel(),
        decode_steps=points,
        decode_context_tokens=float(CONTEXT_TOKENS),
        decode_context_ms=_context_ms(report.decode),
    )
    if report.prefill is not None:
        costs = _with_prefill(costs, report.prefill)
    return CostFile(
        costs=costs,
        device=report.device,
        layout=report.shape,
        format=f"{report.experts} experts, {report.kv} KV",
        source=f"bench.rank: contexts of {CONTEXT_TOKENS} tokens, one GPU, without communication between ranks",
        error=left_out_error(points),
    )


def _context_ms(rows: list[_Decode]) -> float:
    """Milliseconds of attention for each million tokens of context, from the largest step.

    Nearly all of attention's time grows with the context.
    """
    largest = max(rows, key=lambda row: row.requests)
    attention_ms = largest.breakdown.get(ATTENTION, 0.0) / 1000
    return attention_ms / (largest.requests * CONTEXT_TOKENS / MILLION)


def _with_prefill(costs: CostModel, prefill: _Prefill) -> CostModel:
    """Attention grows with the pairs of tokens, all else with the tokens."""
    tokens, pairs = TRACED_PROMPTS * CONTEXT_TOKENS, TRACED_PROMPTS * CONTEXT_TOKENS**2 / 2
    attention_ms = prefill.breakdown.get(ATTENTION, 0.0)
    rest_ms = tokens / prefill.tokens_per_second * 1000 - attention_ms
    return msgspec.structs.replace(
        costs, prefill_tokens_per_second=tokens / rest_ms * 1000, prefill_pairs_ms=attention_ms / pairs * MILLION
    )
