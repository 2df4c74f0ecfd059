"""The form of an endpoint's answers: the interface that every API's form implements."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from gateway.choices import Piece
from gateway.text.delta import Delta, Finish, ScoredPrompt, count_values
from gateway.tools import ToolCallDelta
from mesh.domain.outputs import Logprobs
from mesh.errors import MeshError


class Event(NamedTuple):
    """A server-sent event: its JSON, and its name if clients expect one."""

    data: bytes
    name: str | None = None


@dataclass(slots=True)
class Answer:
    """All deltas of one generation."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    calls: list[ToolCallDelta] = field(default_factory=list)
    finish: Finish | None = None
    prompt: ScoredPrompt | None = None

    def add(self, delta: Delta) -> None:
        self.prompt = self.prompt or delta.prompt
        self.finish = delta.finish
        self.content.append(delta.content)
        self.reasoning.append(delta.reasoning)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.calls.extend(delta.calls)

    @property
    def logprob_values(self) -> int:
        """How many log probabilities it has, its prompt's among them."""
        own = count_values(self.logprobs)
        return own if self.prompt is None else own + self.prompt.logprobs.values

    def as_delta(self) -> Delta:
        """All deltas in one."""
        content, reasoning = "".join(self.content), "".join(self.reasoning)
        return Delta(self.token_ids, content, reasoning, self.logprobs, self.calls, self.finish)


class Form(ABC):
    """Writes one request's answer, whole or as events."""

    # The API's name in metrics.
    API: ClassVar[str] = "openai"
    # Whether a stream's last event is OpenAI's [DONE].
    ENDS_WITH_DONE: ClassVar[bool] = True

    def written(self) -> bytes | None:
        """What another gateway needs to resume the events; None if none can."""
        return None

    def opening(self, index: int) -> Sequence[Event]:
        """The events of a choice that come before its first delta."""
        return ()

    @abstractmethod
    def chunk(self, piece: Piece) -> Sequence[Event]:
        """The events of one delta. A form whose streams can be resumed returns exactly one."""

    def logprob_values(self, piece: Piece) -> int:
        """How many log probabilities `chunk` writes for this piece: many if its client has not read for a while."""
        return piece.delta.logprob_values

    async def closing(self) -> Sequence[Event]:
        """The events after the last delta of all choices."""
        return ()

    @abstractmethod
    def failure(self, error: MeshError) -> Event:
        """The last event of a stream that an error ends."""

    @abstractmethod
    async def whole(self, answers: Sequence[Answer]) -> bytes:
        """All choices, each of which has ended, as JSON."""
