"""A validated request in token ids, and all that is needed to read its answer."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from msgspec import Struct, structs

from gateway.asks import settled_seed
from gateway.text.reasoning import ReasoningStart
from gateway.text.transcript import Transcript
from mesh.domain.outputs import FinishReason
from mesh.domain.requests import StreamTag, TokenRequest


class TextReading(Struct, frozen=True):
    """How an answer's tokens become text."""

    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False
    # The value of a ReasoningStart.
    reasoning: str = ReasoningStart.NONE.value
    # See AnswerShape.closed_by.
    closed_by: int | None = None


@dataclass(frozen=True, slots=True)
class History:
    """The part of an answer that exists already, for a stream that is resumed."""

    received: "array[int]"
    # How the answer ended; None if it is to be continued.
    reason: FinishReason | None
    # Tokens that the client has already.
    delivered: int
    # Whether some tokens were accepted in place of others that the seed gives.
    relaxed: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """A validated request, and all that is needed to read its answer."""

    model: str
    request: TokenRequest
    new_transcript: Callable[[], Transcript]
    # Chain hashes of the prompt's full blocks, root first.
    block_hashes: Sequence[bytes]
    # Text to put before the answer's own.
    echo: str = ""
    # How a resuming gateway reads the answer; None if the answer is more than text, so that it cannot be resumed.
    text: TextReading | None = None
    # The stream's name for workers, and its token for the client; None and empty if the stream cannot be resumed.
    stream: StreamTag | None = None
    stream_token: str = ""
    history: History | None = None
    # The request field that gave the answer's form; None if the answer may be anything.
    form_field: str | None = None

    def sibling(self, number: int) -> "Prepared":
        """The same request for another answer to the prompt, with another seed."""
        sampling = self.request.sampling
        request = structs.replace(
            self.request,
            request_id=f"{self.request.request_id}-{number}",
            # The prompt is the same, so only the first answer scores it.
            sampling=structs.replace(sampling, seed=settled_seed(sampling.seed + number), prompt_logprobs=None),
        )
        return replace(self, request=request, stream=None, stream_token="")
