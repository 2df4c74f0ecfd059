"""The text of one answer: bytes become characters, stop strings end it, reasoning is kept apart from content."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gateway.detokenizer import Detokenizer
from gateway.reasoning import ReasoningSplitter, ReasoningStart
from gateway.stop_strings import StopMatch, StopStrings
from gateway.tool_parser import ToolReading
from gateway.tools import ToolCallDelta


@dataclass(slots=True)
class Passage:
    """What some tokens added to the text."""

    content: str
    reasoning: str
    # How many of the given tokens belong to the answer; fewer than given if a stop string ended the text.
    tokens: int
    match: StopMatch | None = None
    # Pieces of calls of tools.
    calls: list[ToolCallDelta] = field(default_factory=list)


def no_text(token_id: int) -> bytes:
    """`token_bytes` for a model without a tokenizer, which takes and gives token ids only."""
    return b""


class Transcript:
    """Turns tokens into text as they arrive; the result does not depend on how they were grouped."""

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        stop_strings: Sequence[str],
        reasoning: ReasoningStart,
        *,
        include_stop_string: bool = False,
        tools: ToolReading | None = None,
    ) -> None:
        """include_stop_string: the text ends with the stop string that ended it, instead of before it.
        tools: how calls of tools are read; None if the text is all content.
        """
        self.reasoning_tokens = 0
        self._detokenizer = Detokenizer(token_bytes)
        self._stops = StopStrings(stop_strings) if stop_strings else None
        self._include_stop_string = include_stop_string
        self._splitter = ReasoningSplitter(reasoning)
        self._tools = tools.parser() if tools is not None else None
        # Calls that began in the prompt, until they are reported.
        self._begun = self._tools.push(tools.opening).calls if self._tools is not None and tools is not None else []

    @property
    def calls(self) -> int:
        """Tools called so far."""
        return 0 if self._tools is None else self._tools.calls

    def push(self, token_ids: Sequence[int]) -> Passage:
        """The text that these tokens add. Nothing may be pushed after a match."""
        if self._stops is None and self._tools is None and self._splitter.settled:
            return Passage(self._detokenizer.push(token_ids), "", len(token_ids))
        passage = Passage("", "", 0, calls=self._begun)
        self._begun = []
        for token_id in token_ids:
            self._push_one(token_id, passage)
            if passage.match is not None:
                break
        return passage

    def finish(self) -> Passage:
        """The text that was held back, once the last token was pushed; empty if a match ended the text."""
        passage = Passage("", "", 0)
        self._extend(passage, self._detokenizer.finish())
        if self._stops is not None and passage.match is None:
            self._split(passage, self._stops.finish())
        content, reasoning = self._splitter.finish()
        self._read(passage, content)
        passage.reasoning += reasoning
        if self._tools is not None:
            rest = self._tools.finish()
            passage.content += rest.content
            passage.calls += rest.calls
        return passage

    def _push_one(self, token_id: int, passage: Passage) -> None:
        thinking = self._splitter.thinking
        self._extend(passage, self._detokenizer.push((token_id,)))
        passage.tokens += 1
        # The tokens of both tags count as reasoning.
        self.reasoning_tokens += thinking or self._splitter.thinking

    def _extend(self, passage: Passage, text: str) -> None:
        if self._stops is not None:
            text, passage.match = self._stops.push(text)
            if passage.match is not None and self._include_stop_string:
                text += passage.match.string
        self._split(passage, text)

    def _split(self, passage: Passage, text: str) -> None:
        content, reasoning = self._splitter.push(text)
        self._read(passage, content)
        passage.reasoning += reasoning

    def _read(self, passage: Passage, content: str) -> None:
        """Add content to the passage, with calls of tools taken out of it."""
        if self._tools is None:
            passage.content += content
            return
        parsed = self._tools.push(content)
        passage.content += parsed.content
        passage.calls += parsed.calls
