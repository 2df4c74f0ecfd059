"""One request on a simulated worker, as whoever gave it sees it."""

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
    # Prompt tokens that its worker computes for it and has not computed.
    uncomputed_tokens: int = 0
    # On a prefill worker, the landing for the KV, and which of push and first token are over.
    ticket_id: bytes = b""
    pushed: bool = False
    drew: bool = False
    # Those of its prompt and those that it is known to have drawn; None before the first.
    tokens: int | None = None
