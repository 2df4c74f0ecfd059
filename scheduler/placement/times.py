"""How long things take on one worker: to get and compute a prompt, and to wait for a place and for a step. Pure.

A worker gets the KV of a prompt from its own cache, from a store if that is quicker, or by computing it. A request
waits for a place in the batch, for blocks, and for the end of the running step. `mesh/block_room.py` says when the
engine gives a request its blocks. The worker reports how many blocks are free, and how many its waiting requests need;
a placement says how many it needs (`placed_work`). How many a running request holds on average follows from the blocks
that are not free.
"""

from bisect import bisect_left
from math import ceil, inf

import msgspec

from mesh.block_room import lacking_blocks, mean_blocks
from mesh.blocks import BLOCK_TOKENS
from mesh.domain.sparse_prefill import sparse_part
from mesh.domain.targets import StoreTarget
from mesh.tails import is_tail
from scheduler.placement.candidates import CandidateWorker, Pace, PlacementRequest, blocks
from scheduler.placement.constants import Constants
from scheduler.placement.estimates import first_slowness
from scheduler.placement.growth import NO_ANSWERS
from scheduler.placement.prompts import JointPrompts

# Workers report at the end of a step, but at most once within this time, so ends of shorter steps are not known.
SHORTEST_KNOWN_STEP_MS = 50.0


class Source(msgspec.Struct, frozen=True, gc=False):
    """Where the prompt's KV comes from on one worker; times are counted from when the worker begins the prompt."""

    # None if the worker itself has as many blocks, or if computing is faster than fetching.
    store: StoreTarget | None
    # Blocks found on the worker or in the store.
    cached_blocks: int
    uncached_tokens: int
    # Predicted milliseconds of fetch and computation.
    ms: float
    # The computation's part of `ms`, and the part of this that its steps take in addition to the tokens.
    computing_ms: float = 0.0
    steps_ms: float = 0.0
    # How many of the uncached tokens attend sparsely.
    sparse_tokens: int = 0

    @property
    def is_tail(self) -> bool:
        """Whether the prompt, once fetched, waits for no prompt of another rank."""
        return is_tail(self.uncached_tokens, self.cached_blocks)


def source(
    request: PlacementRequest,
    candidate: CandidateWorker,
    pace: Pace,
    store: StoreTarget | None,
    now: float,
    constants: Constants,
) -> Source:
    """The quickest of three ways: compute all that the candidate lacks, fetch first what the store has of it in memory,
    or fetch also what it has on its disk. What the candidate has in host memory it reads from there in any case.

    pace: the candidate's pace. now: see `Candidates`.
    """
    own, reusable, read_ms = candidate.cached_blocks, request.reusable_blocks, 0.0
    if own > reusable:
        own = reusable
    if candidate.host_blocks:
        read_ms = host_read_ms(candidate, min(candidate.host_blocks, reusable - own), constants)
        own = min(own + candidate.host_blocks, reusable)
    best = _computed(request, own, candidate, pace, now, constants)
    if read_ms:
        best = msgspec.structs.replace(best, ms=best.ms + read_ms)
    if store is None:
        return best
    in_memory = store.blocks - store.disk_blocks
    for target in (StoreTarget(store.store_id, in_memory), store) if store.disk_blocks else (store,):
        found = min(target.blocks, request.reusable_blocks)
        if found <= own:
            continue
        rest = _computed(request, found, candidate, pace, now, constants)
        ms = read_ms + rest.ms + _fetch_ms(candidate, pace, own, min(found, in_memory), found, constants)
        if ms < best.ms:
            best = msgspec.structs.replace(rest, store=target, ms=ms)
    return best


def _computed(
    request: PlacementRequest,
    cached_blocks: int,
    candidate: CandidateWorker,
    pace: Pace,
    now: float,
    constants: Constants,
) -> Source:
    cached_tokens, costs = cached_blocks * BLOCK_TOKENS, constants.costs
    uncached_tokens = request.query.prompt_tokens - cached_tokens
    steps_ms = 0.0
    if costs.prefill_step_ms:
        steps = candidate.last_prompt_step.further_steps(uncached_tokens, now, candidate.prompt_step_tokens)
        steps_ms = pace.prompt_slowness * steps * costs.prefill_step_ms
    if request.query.sparse is None or candidate.identity.sparse_prefill is None:
        ms = pace.prompt_slowness * costs.prefill_ms(uncached_tokens, cached_tokens) + steps_ms
        return Source(None, cached_blocks, uncached_tokens, ms, ms, steps_ms)
    sparse = sparse_part(cached_tokens, request.query.prompt_tokens, request.query.sparse.from_tokens)
    exact = uncached_tokens - sparse
    ms = pace.prompt_slowness * costs.prefill_ms(exact, cached_tokens) + steps_ms
    ms += pace.sparse_slowness * costs.sparse_prefill_ms(sparse, cached_tokens + exact)
    return Source(None, cached_blocks, uncached_tokens, ms, ms, steps_ms, sparse)


def host_read_ms(candidate: CandidateWorker, blocks: int, constants: Constants) -> float:
    """Milliseconds to copy blocks from the candidate's host memory, as fast as it measured that."""
    tier = candidate.load.host_tier
    rate = None if tier is None else tier.read_bytes_per_second
    return 1000 * blocks * candidate.identity.block_bytes / (rate or constants.costs.host_read_bytes_per_second)


def _fetch_ms(
    candidate: CandidateWorker, pace: Pace, own: int, in_memory: int, found: int, constants: Constants
) -> float:
    """Milliseconds to fetch the blocks after the candidate's own: the first from a store's memory, the rest from its
    disk.
    """
    memory_seconds = max(0, in_memory - own) * candidate.identity.block_bytes / pace.fetch_bytes_per_second
    disk_seconds = (found - max(own, in_memory)) * candidate.identity.block_bytes / pace.disk_fetch_bytes_per_second
    return constants.costs.fetch_latency_ms + (memory_seconds + disk_seconds) * 1000


def batch(candidate: CandidateWorker) -> float:
    """How many of the worker's requests have blocks once its next step begins. The others wait and decode nothing."""
    load, unreported = candidate.load, candidate.unreported
    pending = load.waiting_requests + unreported.requests
    if not pending:
        return load.running_requests
    taken, free = _pending_blocks(candidate), max(load.free_blocks - load.running_requests - pending, 0)
    if taken <= free:
        return load.running_requests + pending
    return max(load.running_requests + pending * free / taken, 1)


def ends_for_blocks(candidate: CandidateWorker, prompt_tokens: int, held_blocks: int, output_tokens: float) -> float:
    """How many of the worker's requests must end before a further request gets its blocks: from 0 to all of them.

    held_blocks: blocks of the new request's prompt that the worker holds. output_tokens: mean length of the answers
    that end.
    """
    requests, free_blocks = candidate.requests, candidate.load.free_blocks
    lacking = lacking_blocks(prompt_tokens, held_blocks, _pending_blocks(candidate), requests, free_blocks)
    if lacking <= 0:
        return 0
    # Until one request ends, the others together grow by about as much as it has grown since its start. So on balance
    # its end frees only the blocks that it began with.
    freed = mean_blocks(candidate.load, candidate.total_blocks) - output_tokens / 2 / BLOCK_TOKENS
    return min(lacking / max(freed, 1), requests)


def _pending_blocks(candidate: CandidateWorker) -> float:
    """Blocks for the requests that have none yet: those that wait, and those placed since the last report."""
    return candidate.load.waiting_blocks + candidate.unreported.blocks


def place_wait_ms(
    candidate: CandidateWorker, before: float, drain_ms: float, stopping: float, boundary_ms: float, now: float
) -> float:
    """Milliseconds until `before` requests have ended.

    Without `ends`, one request ends every `drain_ms`, and reports are `boundary_ms` old. With `ends`, a share
    `stopping` of the requests ends in this way, and the others end when they reach their token limit.
    """
    if not candidate.ends:
        return before * drain_ms - boundary_ms
    ends, stop_ms = candidate.ends, drain_ms / stopping if stopping else inf

    def ended_ms(count: int) -> float:
        """Milliseconds until `count` requests have reached their token limit."""
        return (ends[count - 1] - now) * 1000 if count else 0.0

    def stopped_ms(ended: int) -> float:
        """Milliseconds until enough others have stopped, if `ended` requests have reached their limit."""
        return (before - ended) * stop_ms - boundary_ms if ended < before else 0.0

    most = min(len(ends), ceil(before))
    if ended_ms(most) < stopped_ms(most):
        # After the known ends, one is assumed every `drain_ms`.
        return min(stopped_ms(most), ended_ms(most) + (before - most) * drain_ms)
    # The more requests reach their limit, the fewer have to stop.
    enough = bisect_left(range(most), True, key=lambda count: ended_ms(count) >= stopped_ms(count))
    return min(ended_ms(enough), stopped_ms(enough - 1)) if enough else 0.0


def step_left_ms(candidate: CandidateWorker, pace: Pace, now: float, constants: Constants) -> float:
    """Milliseconds that are left of the running step when the request reaches the worker."""
    whole_ms = quiet_step_ms(candidate, pace, constants)
    if candidate.step_began is None or whole_ms < SHORTEST_KNOWN_STEP_MS:
        return whole_ms / 2
    # Both the report and the request travel for a while. By then the step may have ended and a later one be running,
    # hence the modulo.
    on_their_way_ms = constants.costs.request_ms / 2
    return whole_ms - ((now - candidate.step_began) * 1000 + on_their_way_ms) % whole_ms


def prompt_begins_ms(
    candidate: CandidateWorker,
    joint: JointPrompts,
    found: Source,
    wait_ms: float,
    pace: Pace,
    now: float,
    constants: Constants,
) -> float:
    """How long a prompt waits to begin together with those of other ranks.

    wait_ms: milliseconds until a step begins in which it has a place.
    """
    comes_at = now + constants.costs.request_ms / 4000
    longest_ms = 0.0
    token_ms = (found.computing_ms - found.steps_ms) / found.uncached_tokens
    full_step_ms = joint.step_tokens * token_ms + pace.prompt_slowness * constants.costs.prefill_step_ms
    divided = joint.divided_tokens is not None and found.uncached_tokens >= joint.divided_tokens
    if found.is_tail or divided:
        if comes_at < joint.begin_at:
            return wait_ms
    elif candidate.requests or candidate.others_requests:
        longest_ms = joint.wait_steps * quiet_step_ms(candidate, pace, constants)
    begins_at = joint.begins_at(comes_at, comes_at + wait_ms / 1000, full_step_ms / 1000, longest_ms / 1000)
    return (begins_at - comes_at) * 1000


def slots_left(tokens_each: float, growth_tokens: float, candidate: CandidateWorker, requests: int) -> int:
    """How many more requests of `tokens_each` tokens fit once those that run have grown by `growth_tokens` in sum. If
    negative, as many must end before there is room.
    """
    load = candidate.load
    free_blocks = load.free_blocks - candidate.unreported.blocks
    if growth_tokens:
        free_blocks -= round(growth_tokens / BLOCK_TOKENS)
    # Waiting requests hold no blocks yet; they are assumed to be as long as this one.
    by_blocks, by_batch = free_blocks // blocks(tokens_each) - load.waiting_requests, candidate.max_requests - requests
    return by_batch if by_batch < by_blocks else by_blocks


def growth_tokens(candidate: CandidateWorker, mean_tokens: float, token_ms: float, now: float, requests: int) -> float:
    """The tokens that the running requests will still get, in sum, each up to the mean length of an answer.

    token_ms: time of a token of each request. An infinite mean counts no growth.
    """
    if not requests or mean_tokens == inf:
        return 0.0
    answers = candidate.answers
    growth = answers.tokens_left(now, token_ms / 1000) if answers is not NO_ANSWERS else 0.0
    # When those of other schedulers began is not known: on average half of each is left.
    growth += max(requests - len(answers), 0) * mean_tokens / 2
    # Those that wait count as slots, with all their tokens.
    return max(growth - candidate.load.waiting_requests * mean_tokens, 0.0)


def step_ms(candidate: CandidateWorker, requests: float, pace: Pace, constants: Constants) -> float:
    """Step time at the candidate's pace with `requests` in the batch."""
    most = candidate.max_requests
    return pace.slowness * constants.costs.decode_ms(requests if requests < most else most)


def quiet_step_ms(candidate: CandidateWorker, pace: Pace, constants: Constants) -> float:
    """Duration of the candidate's steps without prompts."""
    requests = batch(candidate)
    found_ms = step_ms(candidate, requests, pace, constants)
    if candidate.quiet_step_ms is not None and candidate.quiet_step_ms < found_ms:
        found_ms = candidate.quiet_step_ms
    if candidate.joint_prompts is not None:
        # What such a rank measures includes other ranks' prompts.
        first_ms, speed = constants.costs.decode_ms(min(requests, candidate.max_requests)), candidate.identity.speed
        return min(found_ms, first_ms if speed is None else first_ms * first_slowness(speed, constants.costs))
    return found_ms
