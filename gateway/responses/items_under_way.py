"""Builds the items of one answer while it is generated: deltas in, items and their events out."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from gateway.openai.answer_bodies import TokenLogprob
from gateway.responses.output import (
    ArgumentsDelta,
    ArgumentsDone,
    CallItem,
    ItemAdded,
    ItemDone,
    MessageItem,
    OutputItem,
    OutputText,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ReasoningItem,
    ReasoningText,
    ResponseEvent,
    Status,
    TextDelta,
    TextDone,
)
from gateway.text.delta import Delta
from gateway.tools import ToolCallDelta


class _UnderWay(ABC):
    """One item, whose text or arguments come in pieces."""

    PREFIX: str

    def __init__(self, name: str, index: int) -> None:
        """name: the response's name; index: the item's index in its output."""
        self.id = f"{self.PREFIX}_{name}_{index}"
        self.index = index
        self.pieces: list[str] = []

    def begin(self) -> Iterator[ResponseEvent]:
        yield ItemAdded(output_index=self.index, item=self.item("in_progress"))

    @abstractmethod
    def item(self, status: Status) -> OutputItem: ...

    @abstractmethod
    def end(self) -> Iterator[ResponseEvent]:
        """The events that come before the one that says that the item is done."""


class _Reasoning(_UnderWay):
    PREFIX = "rs"

    def begin(self) -> Iterator[ResponseEvent]:
        yield from super().begin()
        yield PartAdded(part=ReasoningText(""), item_id=self.id, output_index=self.index)

    def add(self, text: str) -> ResponseEvent:
        self.pieces.append(text)
        return ReasoningDelta(delta=text, item_id=self.id, output_index=self.index)

    def item(self, status: Status) -> ReasoningItem:
        return ReasoningItem(self.id, [ReasoningText("".join(self.pieces))] if self.pieces else [], status)

    def end(self) -> Iterator[ResponseEvent]:
        text = "".join(self.pieces)
        yield ReasoningDone(text=text, item_id=self.id, output_index=self.index)
        yield PartDone(part=ReasoningText(text), item_id=self.id, output_index=self.index)


class _Message(_UnderWay):
    PREFIX = "msg"

    def __init__(self, name: str, index: int) -> None:
        super().__init__(name, index)
        self.logprobs: list[TokenLogprob] = []
        self._begun = False

    def begin(self) -> Iterator[ResponseEvent]:
        yield from super().begin()
        self._begun = True
        yield PartAdded(part=OutputText(""), item_id=self.id, output_index=self.index)

    def add(self, text: str, logprobs: list[TokenLogprob]) -> ResponseEvent:
        self.pieces.append(text)
        self.logprobs += logprobs
        return TextDelta(delta=text, logprobs=logprobs, item_id=self.id, output_index=self.index)

    def item(self, status: Status) -> MessageItem:
        return MessageItem(self.id, [self._part()] if self._begun else [], status)

    def end(self) -> Iterator[ResponseEvent]:
        part = self._part()
        yield TextDone(text=part.text, logprobs=part.logprobs, item_id=self.id, output_index=self.index)
        yield PartDone(part=part, item_id=self.id, output_index=self.index)

    def _part(self) -> OutputText:
        return OutputText("".join(self.pieces), logprobs=self.logprobs)


class _Call(_UnderWay):
    PREFIX = "fc"

    def __init__(self, name: str, index: int, call: ToolCallDelta) -> None:
        super().__init__(name, index)
        self._call_id, self._function = str(call.id), str(call.name)

    def add(self, arguments: str) -> ResponseEvent:
        self.pieces.append(arguments)
        return ArgumentsDelta(delta=arguments, item_id=self.id, output_index=self.index)

    def item(self, status: Status) -> CallItem:
        return CallItem(self.id, self._call_id, self._function, "".join(self.pieces), status)

    def end(self) -> Iterator[ResponseEvent]:
        arguments = "".join(self.pieces)
        yield ArgumentsDone(name=self._function, arguments=arguments, item_id=self.id, output_index=self.index)


class ItemsUnderWay:
    """Tracks the items of one answer: reasoning, then a message, then tool calls; each may be missing."""

    def __init__(self, name: str) -> None:
        """name: the response's name, for the ids of its items."""
        self.done: list[OutputItem] = []
        self._name = name
        self._open: _UnderWay | None = None
        # Log probabilities of the message's tokens whose text is still held back.
        self._waiting: list[TokenLogprob] = []

    def add(self, delta: Delta, logprobs: Sequence[TokenLogprob]) -> Iterator[ResponseEvent]:
        """logprobs: those of the delta's tokens that come after the reasoning."""
        self._waiting += logprobs
        if delta.reasoning:
            if not isinstance(self._open, _Reasoning):
                yield from self._begin(reasoning := _Reasoning(self._name, len(self.done)))
            else:
                reasoning = self._open
            yield reasoning.add(delta.reasoning)
        going_on, begun = delta.ordered_calls()
        for call in going_on:
            yield from self._call(call)
        if delta.content:
            yield from self._say(delta.content)
        for call in begun:
            yield from self._call(call)

    def end(self, status: Status) -> Iterator[ResponseEvent]:
        """End the answer. If the model neither said nor called anything, the answer is an empty message."""
        if self._open is None or isinstance(self._open, _Reasoning):
            yield from self._close("completed")
            yield from self._begin(_Message(self._name, len(self.done)))
        yield from self._close(status)

    def _say(self, text: str) -> Iterator[ResponseEvent]:
        message = self._open
        if not isinstance(message, _Message):
            yield from self._close("completed")
            message = _Message(self._name, len(self.done))
            yield from self._begin(message)
        yield message.add(text, self._waiting)
        self._waiting = []

    def _call(self, delta: ToolCallDelta) -> Iterator[ResponseEvent]:
        if delta.id is not None:
            yield from self._close("completed")
            yield from self._begin(_Call(self._name, len(self.done), delta))
        if delta.arguments:
            assert isinstance(self._open, _Call)
            yield self._open.add(delta.arguments)

    def _begin(self, item: _UnderWay) -> Iterator[ResponseEvent]:
        self._open = item
        yield from item.begin()

    def _close(self, status: Status) -> Iterator[ResponseEvent]:
        if self._open is None:
            return
        yield from self._open.end()
        item = self._open.item(status)
        self.done.append(item)
        self._open = None
        yield ItemDone(output_index=len(self.done) - 1, item=item)
