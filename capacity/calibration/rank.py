"""A cost file from what `bench.rank` measured of one GPU's engine (its rank.json)."""

from pathlib import Path

import msgspec

from capacity.calibration.fit import left_out_error
from capacity.shapes import SHAPES
from engine.model.config import parse_model_config
from engine.model.masked_rows import selection_in_expanded_keys
from mesh.cost_file import CostFile
from mesh.costs import MILLION, CostModel
from mesh.errors import ConfigError

# The context and the number of traced prompts of bench.rank.
CONTEXT_TOKENS = 3500
TRACED_PROMPTS = 5
ATTENTION, SELECTION = "attention", "selection"


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
        **_selection(report.shape),
    )
    costs = _with_context(costs, report.decode)
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


def _selection(shape: str) -> dict[str, float | None]:
    config = parse_model_config(SHAPES[shape]) if shape in SHAPES else None
    if config is None or config.indexer is None:
        return {"selected_tokens": None, "prompt_selected_tokens": None}
    expanded = selection_in_expanded_keys(config)
    return {"selected_tokens": float(config.indexer.top_k), "prompt_selected_tokens": float(expanded)}


def _with_context(costs: CostModel, rows: list[_Decode]) -> CostModel:
    """Milliseconds of attention for each million tokens that are attended to, and of selection for each million of
    context, from the largest step. Nearly all of both grows with them.
    """
    largest = max(rows, key=lambda row: row.requests)
    attended, context = costs.attended_tokens(CONTEXT_TOKENS), CONTEXT_TOKENS
    attention_ms, selection_ms = (largest.breakdown.get(group, 0.0) / 1000 for group in (ATTENTION, SELECTION))
    return msgspec.structs.replace(
        costs,
        decode_context_ms=attention_ms / (largest.requests * attended / MILLION),
        index_context_ms=selection_ms / (largest.requests * context / MILLION),
    )


def _with_prefill(costs: CostModel, prefill: _Prefill) -> CostModel:
    """Attention grows with the pairs of tokens that it reads, selection with all pairs, all else with the tokens."""
    tokens, pairs = TRACED_PROMPTS * CONTEXT_TOKENS, TRACED_PROMPTS * CONTEXT_TOKENS**2 / 2
    early = CONTEXT_TOKENS if costs.most_pairs is None else min(CONTEXT_TOKENS, costs.most_pairs)
    attended = TRACED_PROMPTS * (early**2 / 2 + (CONTEXT_TOKENS - early) * early)
    attention_ms, selection_ms = (prefill.breakdown.get(group, 0.0) for group in (ATTENTION, SELECTION))
    rest_ms = tokens / prefill.tokens_per_second * 1000 - attention_ms - selection_ms
    return msgspec.structs.replace(
        costs,
        prefill_tokens_per_second=tokens / rest_ms * 1000,
        prefill_pairs_ms=attention_ms / attended * MILLION,
        index_pairs_ms=selection_ms / pairs * MILLION,
    )
