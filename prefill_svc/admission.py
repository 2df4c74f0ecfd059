"""Whether this worker takes a prompt: checks that it can be computed and pushed here, and that there is room for it
now. Pure.
"""

from engine.protocol.messages import Ready
from mesh.blocks import blocks_for
from mesh.domain.constraints import check_constraint
from mesh.domain.sampling import check_sampling
from mesh.domain.sparse_prefill import check_sparse_prefill
from mesh.errors import InvalidRequest, WorkerFull
from prefill_svc.config import PrefillQueueConfig
from prefill_svc.jobs import PromptBacklog
from prefill_svc.prompts import Prompt
from transfer.config import TransferConfig
from transfer.ticket import Ticket
from transfer.tickets import Geometry, refusal_of
from worker.acceptance import check_prompt, check_salt

# A landing with a longer deadline is a mistake, and would hold blocks for as long.
MAX_DEADLINE_MS = 3_600_000
MAX_ADDRESS_BYTES = 16_384


def check(prompt: Prompt, ready: Ready, transfer: TransferConfig) -> None:
    """Raises InvalidRequest or ContextExceeded if this worker could never compute the prompt or push its KV.

    Raises NamespaceMismatch if its KV has another meaning for the receiver.
    """
    check_salt(prompt.request.cache_salt)
    check_prompt(prompt.request.token_ids, 1, ready)
    check_sampling(prompt.request.sampling, ready.vocabulary_size)
    if prompt.request.constraint is not None:
        check_constraint(prompt.request.constraint, ready.vocabulary_size)
    if prompt.request.sparse is not None:
        check_sparse_prefill(prompt.request.sparse)
    blocks = blocks_for(len(prompt.request.token_ids)) - prompt.held_blocks
    if blocks < 1:
        raise InvalidRequest(
            f"held_blocks {prompt.held_blocks} are the whole prompt: the landing has no block", field="held_blocks"
        )
    _check_ticket(prompt.ticket, blocks, ready, transfer)


def admit(prompt: Prompt, backlog: PromptBacklog, max_requests: int, queue: PrefillQueueConfig) -> None:
    """Raises WorkerFull if the prompt must go elsewhere. `max_requests` prompts run at once.

    Waiting prompts count only to the extent that they are served before this one.
    """
    waiting = backlog.live_prompts - max_requests
    if waiting * backlog.ahead >= queue.waiting_prompts:
        raise WorkerFull(f"{waiting} prompts wait on this worker already: place this one on another")
    queued = backlog.queued_tokens
    if queued and queued * backlog.ahead + len(prompt.request.token_ids) > queue.queued_tokens:
        raise WorkerFull(f"{queued} prompt tokens wait on this worker already: place this prompt on another")


def _check_ticket(ticket: Ticket, blocks: int, ready: Ready, transfer: TransferConfig) -> None:
    layers = ready.namespace.layers
    geometry = Geometry(layers, ready.block_bytes // layers, transfer.slot_bytes)
    # The rank makes the same check, and counts what it refuses.
    refusal = refusal_of(ticket, blocks, ready.namespace, geometry)
    if refusal is not None:
        raise refusal.error
    if ticket.deadline_ms > MAX_DEADLINE_MS:
        raise InvalidRequest(f"deadline_ms must be at most {MAX_DEADLINE_MS}", field="ticket")
    first = ticket.segments[0]
    for segment in ticket.segments:
        if not 0 < len(segment.worker_address) <= MAX_ADDRESS_BYTES:
            raise InvalidRequest(f"segment {segment.index} has no address of a rank to push to", field="ticket")
        # All of a request's KV lies on one rank.
        if (segment.destination_rank, segment.worker_address) != (first.destination_rank, first.worker_address):
            raise InvalidRequest(f"segment {segment.index} goes to another rank than the first", field="ticket")
