"""From a Submit to a request of this engine."""

from dataclasses import dataclass

from engine.progress import Progress
from engine.protocol.messages import Submit
from engine.request import Request
from mesh.blocks import root_hash
from mesh.errors import ContextExceeded, InvalidRequest


@dataclass(frozen=True, slots=True)
class Room:
    """What any request must fit."""

    context_tokens: int
    vocabulary_size: int


def check(submit: Submit, room: Room) -> None:
    """Raises InvalidRequest. The gateway has checked all this; a backend fed otherwise may take the rank down."""
    if not submit.token_ids:
        raise InvalidRequest("the prompt is empty: send at least one token", field="prompt")
    if submit.max_tokens < 1:
        raise InvalidRequest("max_tokens must be at least 1", field="max_tokens")
    if min(submit.token_ids) < 0 or max(submit.token_ids) >= room.vocabulary_size:
        raise InvalidRequest(f"token ids must be from 0 to {room.vocabulary_size - 1}", field="prompt")
    total = len(submit.token_ids) + submit.max_tokens
    if total > room.context_tokens:
        raise ContextExceeded(
            f"{len(submit.token_ids)} prompt tokens and max_tokens {submit.max_tokens} make {total}, and this"
            f" worker has room for {room.context_tokens}: shorten the prompt or lower max_tokens"
        )


def make_request(submit: Submit, eos_token_ids: frozenset[int], arrival: tuple[int, int]) -> Request:
    """`eos_token_ids`: the model's own; `arrival`: the arrival batch, and the order within it."""
    eos = frozenset() if submit.ignore_eos else eos_token_ids
    return Request(
        key=submit.key,
        request_id=submit.request_id,
        progress=Progress(submit.token_ids),
        prompt_tokens=len(submit.token_ids),
        limit=len(submit.token_ids) + submit.max_tokens,
        stop_token_ids=eos.union(submit.stop_token_ids),
        sampling=submit.sampling,
        root=root_hash(submit.cache_salt),
        arrival=arrival,
        lands=submit.lands,
        sender_slot_bytes=submit.sender_slot_bytes,
        attempt=submit.attempt,
        fetch=submit.fetch,
        push=submit.push,
    )
