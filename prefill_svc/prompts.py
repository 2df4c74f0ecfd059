"""One prompt to compute, and the events that its caller gets."""

import asyncio
from dataclasses import dataclass

from engine.protocol.messages import Output, PushTarget, Submit
from mesh.domain.outputs import FinishReason
from mesh.domain.requests import TokenRequest
from mesh.domain.targets import StoreTarget
from mesh.errors import MeshError, PushFailed, rebuild
from transfer.events import PushEnded
from transfer.ticket import Ticket


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as a decode worker sends it."""

    # The request ends with its first token; the decode worker decides whether that is also the answer's last.
    request: TokenRequest
    # The landing for its KV. It begins after the blocks that the decode worker already holds.
    ticket: Ticket
    held_blocks: int
    # A store that may hold a prefix of the prompt.
    store: StoreTarget | None
    # The rank on which the scheduler counts it; None if it does not say.
    rank: int | None = None

    def to_rank(self, key: int) -> Submit:
        """The message that submits the prompt to a rank."""
        return Submit(key, self.request, push=PushTarget(self.ticket, self.held_blocks), fetch=self.store)


# An Output brings the first token.
Event = Output | PushEnded


class Job:
    """A prompt that a rank has. It ends with its PushEnded event, or with an error.

    The rank may report the end of the push before the first token; the caller always gets it last.
    """

    def __init__(self, key: int, prompt: Prompt, deadline: float) -> None:
        # Names the prompt between service and rank.
        self.key = key
        self.prompt = prompt
        # In seconds on the jobs' clock.
        self.deadline = deadline
        self.has_first_token = False
        # Whether the queued events are the last ones.
        self._ended = False
        self._pushed: PushEnded | None = None
        self._events: asyncio.Queue[Event | MeshError] = asyncio.Queue()

    @property
    def transfer_id(self) -> bytes:
        return self.prompt.ticket.transfer_id

    async def next_event(self) -> Event:
        """The next event. Raises MeshError if the prompt cannot be computed or pushed."""
        event = await self._events.get()
        if isinstance(event, MeshError):
            raise event
        return event

    def on_output(self, output: Output) -> None:
        if output.refusal is not None:
            self.fail(rebuild(output.refusal.reason, output.refusal.message))
        elif output.token_ids and not self.has_first_token:
            self.has_first_token = True
            self._emit(output)
            self._end_if_pushed()
        elif output.finish is FinishReason.CANCELLED:
            self.fail(PushFailed("the prompt was cancelled"))

    def on_push_ended(self, ended: PushEnded) -> None:
        if ended.error is not None:
            self.fail(PushFailed(f"the KV was not pushed: {ended.error}"))
            return
        self._pushed = ended
        self._end_if_pushed()

    def fail(self, error: MeshError) -> None:
        """End the prompt with an error. Only the first error counts."""
        self._emit(error)
        self._ended = True

    def _end_if_pushed(self) -> None:
        if self.has_first_token and self._pushed is not None:
            self._emit(self._pushed)
            self._ended = True

    def _emit(self, event: Event | MeshError) -> None:
        if not self._ended:
            self._events.put_nowait(event)
