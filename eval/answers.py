"""The answers of one evaluation, written down as they arrive, so that a stopped run can go on where it was."""

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self

import msgspec

from mesh.errors import ConfigError

Ending = Literal["stop", "length", "refused"]


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """The endpoint's answer to one question."""

    question: str
    digest: str
    right: bool
    # "length": cut off at max_tokens. "refused": the endpoint would not take the question; `content` says why.
    ending: Ending
    prompt_tokens: int
    answer_tokens: int
    content: str
    reasoning: str


class DocumentScore(msgspec.Struct, frozen=True, tag="score"):
    """The likelihood of one text under a model."""

    document: str
    digest: str
    # Sum of -log p over the tokens that were scored, in nats.
    negative_log_likelihood: float
    tokens: int


class _Header(msgspec.Struct, frozen=True, tag="settings"):
    settings: dict[str, Any]


_Line = _Header | Answer | DocumentScore


class AnswerLog:
    """An append-only file of JSON lines: the settings, then answers and scores in the order of their arrival.

    Opening an existing file reads it. Raises ConfigError if it holds answers to other settings or is no such file.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.answers: dict[str, Answer] = {}
        self.scores: dict[str, DocumentScore] = {}
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = [self._decode(number, line) for number, line in enumerate(self._lines(), start=1)]
        self._file: BinaryIO = path.open("ab")
        if len(entries) > 1:
            self._take(entries, settings)
        else:
            # Nothing was answered yet, so the settings do not matter.
            self._file.truncate(0)
            self._write(_Header(dict(settings)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, entry: Answer | DocumentScore) -> None:
        """Keep an entry and write it to the file at once."""
        self._write(entry)
        self._keep(entry)

    def _write(self, line: _Line) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def _keep(self, entry: Answer | DocumentScore) -> None:
        if isinstance(entry, Answer):
            self.answers[entry.question] = entry
        else:
            self.scores[entry.document] = entry

    def _lines(self) -> list[bytes]:
        """The complete lines. An incomplete last line, whose run was killed while writing it, is removed."""
        content = self._path.read_bytes() if self._path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            self._path.write_bytes(whole)
        return whole.split(b"\n")[:-1]

    def _take(self, entries: list[_Line], settings: Mapping[str, Any]) -> None:
        for entry in entries:
            if isinstance(entry, _Header):
                self._check(entry.settings, settings)
            else:
                self._keep(entry)

    def _decode(self, number: int, line: bytes) -> _Line:
        try:
            entry: _Line = msgspec.json.decode(line, type=_Line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"{self._path}, line {number}: {error}; {self._advice}") from error
        if (number == 1) != isinstance(entry, _Header):
            raise ConfigError(f"{self._path} is no log of answers; {self._advice}")
        return entry

    def _check(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        changed = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
        if changed:
            differences = ", ".join(f"{key} {before.get(key)!r}, now {now.get(key)!r}" for key in changed)
            raise ConfigError(f"{self._path} holds answers to other settings ({differences}); {self._advice}")

    @property
    def _advice(self) -> str:
        return f"name another directory with --out, or delete {self._path.parent} to begin again"
