"""Published traces: Mooncake's (JSON lines) and Azure's (CSV), replayed."""

import csv
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from loadgen.traces import BLOCK_TOKENS, TraceRow, in_order, mooncake_rows
from mesh.errors import ConfigError
from mesh.text_files import read_text
from sim.asked import Asked, Prompts, with_length
from sim.device import LONGEST_OUTPUT
from sim.workload import WorkloadConfig

# Most texts that are remembered by their hash ids.
REMEMBERED_TEXTS = 200_000


def read_trace(path: Path) -> list[TraceRow]:
    """The trace's requests in the order of their times, the first at 0. Raises ConfigError that names a broken line."""
    try:
        text = read_text(path)
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error
    lines = text.splitlines()
    if not lines:
        raise ConfigError(f"the trace {path} is empty")
    return in_order(path, _azure_rows(path, lines)) if "TIMESTAMP" in lines[0] else mooncake_rows(path, lines)


class TraceWorkload:
    """A trace's requests. Equal hash ids stand for equal texts; tokens that no hash id covers are fresh."""

    def __init__(self, config: WorkloadConfig) -> None:
        assert config.trace is not None
        self._config = config
        self._rows = read_trace(config.trace)
        self._prompts = Prompts()
        self._texts: dict[int, list[int]] = {}

    @property
    def longest(self) -> int:
        return max(row.input_length + row.output_length for row in self._rows)

    def __iter__(self) -> Iterator[Asked]:
        for row in self._rows:
            seconds = row.timestamp / 1000 / self._config.speed
            if seconds >= self._config.seconds:
                return
            output = min(row.output_length, LONGEST_OUTPUT - 1)
            yield Asked(seconds, with_length(self._text(row), output), output, self._config.max_tokens or output)

    def _text(self, row: TraceRow) -> list[int]:
        text: list[int] = []
        for hash_id in row.hash_ids:
            text += self._block(hash_id)
        text = text[: row.input_length]
        return [*text, *self._prompts.fresh(row.input_length - len(text))]

    def _block(self, hash_id: int) -> list[int]:
        found = self._texts.pop(hash_id, None) or self._prompts.fresh(BLOCK_TOKENS)
        # The least recently used text comes first.
        self._texts[hash_id] = found
        if len(self._texts) > REMEMBERED_TEXTS:
            del self._texts[next(iter(self._texts))]
        return found


def _azure_rows(path: Path, lines: list[str]) -> list[tuple[int, TraceRow]]:
    rows = []
    for number, row in enumerate(csv.DictReader(lines), start=2):
        try:
            # The trace has seven digits after the second's point, and datetime reads six.
            at = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() * 1000
            rows.append((number, TraceRow(at, int(row["ContextTokens"]), int(row["GeneratedTokens"]))))
        except (KeyError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{path}, line {number}: expected TIMESTAMP, ContextTokens and GeneratedTokens ({error})"
            ) from error
    return rows
