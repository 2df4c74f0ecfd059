"""What the gateway needs to know of a format of tool calls: how calls are written, and how they are read."""

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.forms.answer_forms import json_rule
from gateway.text.reasoning import THINK_CLOSE
from gateway.text.signs import Signs
from gateway.tools import ToolCall, ToolCallDelta


@dataclass(slots=True)
class Parsed:
    """Content and pieces of calls, in the order in which the model wrote them."""

    parts: list[str | ToolCallDelta] = field(default_factory=list)

    @property
    def content(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[ToolCallDelta]:
        return [part for part in self.parts if isinstance(part, ToolCallDelta)]


class CallReader(ABC):
    """Splits an answer, in signed text, into content and calls; the result does not depend on how it was split.

    Holds back only what may turn out to be a part of a call. Nothing that a model wrote is lost, except the format's
    own markers and the white space next to them: what is no call is content.
    """

    # Calls so far.
    calls: int

    @abstractmethod
    def begin(self, opening: str) -> Parsed:
        """Read the beginning of the answer that the prompt contains already. It never becomes content."""

    @abstractmethod
    def push(self, text: str) -> Parsed:
        """The content and the calls that are certain so far."""

    @abstractmethod
    def finish(self) -> Parsed:
        """What was held back, now that nothing follows."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a call that is not always the same: the right side of a rule in Lark."""

    rule: str


class ToolFormat(ABC):
    """How calls are written. A piece of text that is one of `markers` is a token where the vocabulary has it."""

    # All texts that are tokens in the models' vocabularies.
    markers: frozenset[str]
    # Around all calls of an answer, if anything is, and between two of them.
    begin: str
    end: str
    between: str
    # What ends reasoning before the first call, if the model has had no chance to.
    reasoning_end = f"\n{THINK_CLOSE}\n\n"
    # Whether arguments are written as JSON.
    json_arguments = True
    # From a call's beginning to its name, and from its arguments to its end.
    head: Sequence[str]
    tail: Sequence[str]

    @abstractmethod
    def after_name(self, index: int | None) -> Sequence[str | Piece]:
        """The pieces from a call's name to its arguments. index: which call of the chat it is; None for any."""

    @abstractmethod
    def outputs(self, outputs: Sequence[str]) -> str:
        """Results of calls, in their order, for templates that write none."""

    @abstractmethod
    def reader(
        self, signs: Signs, parallel: bool, new_id: Callable[[], str], tools: Mapping[str, Mapping[str, Any]]
    ) -> CallReader:
        """parallel: whether to report calls after the first. tools: schemas of arguments by the tools' names."""

    @property
    def start(self) -> str:
        """The text with which a model begins to call."""
        return self.begin or self.head[0]

    @property
    def trigger(self) -> str:
        """The marker in `start` that shows that the model begins to call."""
        return self.start

    def argument_rules(
        self, name: str, schema: Mapping[str, Any], lenient: bool, piece: Callable[[str], str]
    ) -> list[str]:
        """Definitions, in Lark, of a rule of this name for arguments that match the schema.

        lenient: parts of the schema that cannot be enforced are left out. piece: how a marker stands in a rule.
        """
        return [f"{name}: {json_rule(schema, lenient)}"]

    def opening(self, name: str | None, earlier: int = 0) -> str:
        """The beginning of an answer that calls a tool: up to the name, or up to the arguments if the name is known.

        earlier: how many calls the chat has already.
        """
        opened = self.begin + "".join(self.head)
        return opened if name is None else f"{opened}{name}{self._named(earlier)}"

    def calls(self, calls: Sequence[ToolCall]) -> str:
        """Calls of an earlier turn, as the model would write them."""
        return self.begin + self.between.join(map(self._call, range(len(calls)), calls)) + self.end

    def _call(self, index: int, call: ToolCall) -> str:
        return "".join((*self.head, call.name, self._named(index), call.arguments, *self.tail))

    def _named(self, index: int) -> str:
        return "".join(piece for piece in self.after_name(index) if isinstance(piece, str))


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True)
class ToolReading:
    """How the calls of one answer are to be read."""

    format: ToolFormat
    parallel: bool
    # The beginning of the answer that the prompt contains already.
    opening: str
    # Schemas of arguments by the tools' names.
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def start(self, signs: Signs) -> str | None:
        """The text with which a model begins to call, signed; None if no token tells it from other text."""
        start = self.format.start.lstrip()
        signed = signs.signed(start)
        return None if signed == start else signed

    def reader(self, signs: Signs) -> CallReader:
        return self.format.reader(signs, self.parallel, new_call_id, self.tools)
