"""Traces in the format that Mooncake publishes (github.com/kvcache-ai/Mooncake): JSON lines, without any text."""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from loadgen.options import LONGEST_PROMPT
from mesh.errors import ConfigError

# A hash id stands for this many tokens; the last one of a prompt may stand for fewer.
BLOCK_TOKENS = 512
# Names that rows of no other dataset have.
OWN_FIELDS = {"input_length", "hash_ids"}


class TraceRow(msgspec.Struct, forbid_unknown_fields=True):
    """One request. `timestamp` is in milliseconds, lengths in tokens; equal hash ids stand for equal texts."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def is_trace(lines: Sequence[str]) -> bool:
    """Whether a dataset of these lines is a trace, by the first that is not blank."""
    first_line = next(line for line in lines if line.strip())
    try:
        return bool(OWN_FIELDS & msgspec.json.decode(first_line, type=dict[str, msgspec.Raw]).keys())
    except msgspec.DecodeError:
        return False


def mooncake_rows(path: Path, lines: Sequence[str]) -> list[TraceRow]:
    """The requests of these lines, as `in_order` gives them. Raises ConfigError that names the line that is wrong."""
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append((number, msgspec.json.decode(line, type=TraceRow)))
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error
    return in_order(path, rows)


def in_order(path: Path, rows: Iterable[tuple[int, TraceRow]]) -> list[TraceRow]:
    """The requests in the order of their times, the first at 0.

    rows: with the numbers of their lines. Raises ConfigError for a request that cannot be, and if there is none.
    """
    checked = []
    for number, row in rows:
        complaint = _complaint(row)
        if complaint is not None:
            raise ConfigError(f"{path}, line {number}: {complaint}")
        checked.append(row)
    if not checked:
        raise ConfigError(f"the trace {path} has no request")
    checked.sort(key=lambda row: row.timestamp)
    first = checked[0].timestamp
    return [msgspec.structs.replace(row, timestamp=row.timestamp - first) for row in checked]


def _complaint(row: TraceRow) -> str | None:
    if not 0 <= row.timestamp < math.inf:
        return f"the timestamp is {row.timestamp:g}, and times count from 0"
    if row.input_length < 1 or row.output_length < 1:
        return "lengths must be at least 1"
    if max(row.input_length, row.output_length) > LONGEST_PROMPT:
        return f"lengths must be at most {LONGEST_PROMPT:,}"
    # A writer may leave out the id of the last, incomplete block. A row without ids shares nothing.
    whole = row.input_length // BLOCK_TOKENS
    if row.hash_ids and len(row.hash_ids) < whole:
        return (
            f"{len(row.hash_ids)} hash_ids are too few for input_length {row.input_length}, which has {whole} whole"
            f" blocks of {BLOCK_TOKENS} tokens"
        )
    return None
