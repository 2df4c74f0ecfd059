"""A validated request in token ids, and what its answer needs."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from msgspec import Struct, structs

from gateway.asks import settled_seed
from gateway.reasoning import ReasoningStart
from gateway.transcript import Transcript
from mesh.domain.outputs import FinishReason
from mesh.domain.requests import StreamTag, TokenRequest


class TextReading(Struct, frozen=True):
    """How an answer's tokens become text."""

    stop_strings: tuple[str, ...] = ()
    include_stop_string: bool = False
    # A ReasoningStart.
    reasoning: str = ReasoningStart.NONE.value
    # As of AnswerShape.
    closed_by: int | None = None


@dataclass(frozen=True, slots=True)
class History:
    """What there is already of an answer that is gone on with."""

    received: "array[int]"
    # How it ended; None if it goes on.
    reason: FinishReason | None
    # Tokens that the client has.
    delivered: int
    # Some tokens were accepted in place of others that the seed gives.
    relaxed: bool = False


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that was validated, and what its answer needs."""

    model: str
    request: TokenRequest
    new_transcript: Callable[[], Transcript]
    # Chain hashes of the prompt's full blocks, root first.
    block_hashes: Sequence[bytes]
    # What comes before the answer's text.
    echo: str = ""
    # None if the answer is more than text.
    text: TextReading | None = None
    # Names the stream, for workers and for its client; None and empty if it cannot be continued.
    stream: StreamTag | None = None
    stream_token: str = ""
    history: History | None = None
    # Where the client wrote what its answer must be; None if it may be anything.
    form_field: str | None = None

    def sibling(self, number: int) -> "Prepared":
        """The same for another answer to the prompt, with random numbers of its own."""
        sampling = self.request.sampling
        request = structs.replace(
            self.request,
            request_id=f"{self.request.request_id}-{number}",
            # The prompt is the same: it is scored once.
            sampling=structs.replace(sampling, seed=settled_seed(sampling.seed + number), prompt_logprobs=None),
        )
        return replace(self, request=request, stream=None, stream_token="")
