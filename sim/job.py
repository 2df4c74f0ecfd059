"""One request on a simulated worker, as the caller that submitted it sees it."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.protocol.messages import Output
from mesh.domain.requests import Submission
from mesh.domain.shares import Share
from mesh.errors import MeshError

OnOutput = Callable[[Output], None]
OnLost = Callable[[MeshError], None]


@dataclass(slots=True, eq=False)
class Job:
    key: int
    on_output: OnOutput
    on_lost: OnLost
    share: Share
    submission: Submission | None = None
    # Prompt tokens that this worker has still to compute for it.
    uncomputed_tokens: int = 0
    # On a prefill worker: the landing that gets the KV, whether its push has ended, whether the first token was drawn.
    ticket_id: bytes = b""
    pushed: bool = False
    drew: bool = False
    # Tokens of its prompt and of its answer as far as reported; None before the first output.
    tokens: int | None = None
