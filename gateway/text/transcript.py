"""The text of one answer: turns bytes into characters, ends at stop strings, separates reasoning from content."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from gateway.text.detokenizer import Detokenizer
from gateway.text.reasoning import THINK_CLOSE, ReasoningSplitter, ReasoningStart
from gateway.text.signs import NO_SIGNS, Signs
from gateway.text.stop_strings import StopMatch, StopStrings
from gateway.tool_formats.interface import Parsed, ToolReading
from gateway.tools import ToolCallDelta

PARAGRAPH_END = "\n\n"


@dataclass(slots=True)
class Passage:
    """The text that some tokens added."""

    content: str
    reasoning: str
    # How many of the given tokens belong to the answer: not all if a stop string ended the text.
    tokens: int
    match: StopMatch | None = None
    # Pieces of tool calls.
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
        closed_by: int | None = None,
        signs: Signs = NO_SIGNS,
    ) -> None:
        """include_stop_string: the text ends with the stop string that ended it, rather than before it.
        tools: how tool calls are read; None if the text is all content.
        closed_by: the token that ends reasoning, if the prompt has ended it. If the model ends it again, the token
        reads as the end of a paragraph, unless a stop string looks for the tag.
        signs: of the markers that are tokens of the vocabulary; only as tokens they end reasoning or begin calls.
        """
        self.reasoning_tokens = 0
        self._detokenizer = Detokenizer(token_bytes)
        self._signs = signs
        self._stops = StopStrings(stop_strings, signs) if stop_strings else None
        self._include_stop_string = include_stop_string
        # A model may begin to call while it thinks.
        self._splitter = ReasoningSplitter(reasoning, signs, None if tools is None else tools.start(signs))
        self._closed_by = None if any(THINK_CLOSE in string for string in stop_strings) else closed_by
        self._tools = tools.reader(signs) if tools is not None else None
        # What is certain of calls that began in the prompt.
        self._begun = Passage("", "", 0)
        if self._tools is not None and tools is not None:
            self._add(self._tools.begin(signs.signed(tools.opening)), self._begun)

    @property
    def calls(self) -> int:
        """Tools called so far."""
        return 0 if self._tools is None else self._tools.calls

    def push(self, token_ids: Sequence[int]) -> Passage:
        """The text that these tokens add. Nothing may be pushed after a match."""
        ends_again = self._closed_by is not None and self._closed_by in token_ids
        if self._stops is None and self._tools is None and self._splitter.settled and not ends_again:
            return Passage(self._detokenizer.push(token_ids), "", len(token_ids))
        passage, self._begun = self._begun, Passage("", "", 0)
        for token_id in token_ids:
            self._push_one(token_id, passage)
            if passage.match is not None:
                break
        return passage

    def finish(self) -> Passage:
        """The text that was held back, after the last token; empty if a match ended the text."""
        passage, self._begun = self._begun, Passage("", "", 0)
        self._extend(passage, self._detokenizer.finish())
        if self._stops is not None and passage.match is None:
            self._split(passage, self._stops.finish())
        content, reasoning = self._splitter.finish()
        self._read(passage, content)
        passage.reasoning += self._signs.spelled(reasoning)
        if self._tools is not None:
            self._add(self._tools.finish(), passage)
        return passage

    def _push_one(self, token_id: int, passage: Passage) -> None:
        thinking = self._splitter.thinking
        self._extend(passage, self._text_of(token_id))
        passage.tokens += 1
        # The tokens of both tags count as reasoning.
        self.reasoning_tokens += thinking or self._splitter.thinking

    def _text_of(self, token_id: int) -> str:
        """The signed text that one token completes."""
        sign = self._signs.of_token(token_id)
        if token_id == self._closed_by and not self._splitter.thinking:
            sign = PARAGRAPH_END if self._splitter.begun else ""
        return self._detokenizer.push((token_id,)) if sign is None else self._detokenizer.finish() + sign

    def _extend(self, passage: Passage, text: str) -> None:
        if self._stops is not None:
            text, passage.match = self._stops.push(text)
            if passage.match is not None and self._include_stop_string:
                text += self._signs.signed(passage.match.string)
        self._split(passage, text)

    def _split(self, passage: Passage, text: str) -> None:
        content, reasoning = self._splitter.push(text)
        self._read(passage, content)
        passage.reasoning += self._signs.spelled(reasoning)

    def _read(self, passage: Passage, content: str) -> None:
        """Add content to the passage; tool calls in it are taken out."""
        if self._tools is None:
            passage.content += self._signs.spelled(content)
        elif content:
            self._add(self._tools.push(content), passage)

    def _add(self, parsed: Parsed, passage: Passage) -> None:
        passage.content += self._signs.spelled(parsed.content)
        passage.calls += map(self._spelled, parsed.calls)

    def _spelled(self, call: ToolCallDelta) -> ToolCallDelta:
        name = None if call.name is None else self._signs.spelled(call.name)
        return replace(call, name=name, arguments=self._signs.spelled(call.arguments))
