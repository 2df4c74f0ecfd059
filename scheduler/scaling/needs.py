"""The load of each role, in units of what one of its workers can do within the objectives. Pure."""

from collections.abc import Sequence
from statistics import fmean

from mesh.domain.workers import WorkerRole
from scheduler.config import ObjectivesConfig, ScalingConfig
from scheduler.placement.candidates import Candidates, CandidateWorker, Pace
from scheduler.placement.constants import Constants
from scheduler.placement.estimates import paces, prompt_rates
from scheduler.placement.times import growth_tokens, slots_left, step_ms
from scheduler.scaling.arrivals import Demand
from scheduler.scaling.replicas import Need

# Waiting prompts should be computed within this share of the objective for the first token, or of a second without an
# objective. The rest is for the prompt itself and for moving its KV.
WAITING_SHARE = 0.5
DEFAULT_TTFT_MS = 1000.0
# Refusals per second below which the last refusal was minutes ago.
FORGOTTEN = 1e-4


def needs(
    candidates: Candidates,
    demand: Demand,
    mean_output_tokens: float | None,
    constants: Constants,
    objectives: ObjectivesConfig,
    config: ScalingConfig,
) -> dict[WorkerRole, list[Need]]:
    """Needs by role. Without prefill workers the decode workers compute the prompts, so they have both needs."""
    decode_paces, _ = paces(candidates, constants)
    prefill = [worker for worker in candidates.prefill if worker.unusable is None]
    decode = [each for each in zip(candidates.decode, decode_paces, strict=True) if each[0].unusable is None]
    rates = prompt_rates(candidates, constants.costs)
    computing = prefill or [worker for worker, _ in decode]
    prompts = _prompts(computing, [rates[each.identity.worker_id] for each in computing], demand, constants, objectives)
    output = mean_output_tokens or constants.config.mean_output_tokens
    generations = _generations(decode, demand, output, candidates.now, constants, objectives, config)
    return {
        WorkerRole.PREFILL: [prompts],
        WorkerRole.DECODE: [generations] if prefill else [generations, prompts],
    }


def _prompts(
    workers: Sequence[CandidateWorker],
    rates: Sequence[float],
    demand: Demand,
    constants: Constants,
    objectives: ObjectivesConfig,
) -> Need:
    """rates: prompt tokens per second of each worker."""
    queued = sum(worker.load.queued_prefill_tokens + worker.unreported.prefill_tokens for worker in workers)
    seconds = (objectives.ttft_ms or DEFAULT_TTFT_MS) * WAITING_SHARE / 1000
    per_second = fmean(rates) if rates else constants.costs.prefill_tokens_per_second
    # A queue up to this length is the intended use of a worker.
    excess = max(0.0, queued - per_second * seconds * len(workers))
    return Need(demand.prompt_tokens + excess / seconds, per_second, "prompt tokens/s")


def _generations(
    workers: Sequence[tuple[CandidateWorker, Pace]],
    demand: Demand,
    output_tokens: float,
    now: float,
    constants: Constants,
    objectives: ObjectivesConfig,
    config: ScalingConfig,
) -> Need:
    tokens_each = demand.mean_prompt_tokens + output_tokens
    capacities = [
        _capacity(worker, pace, tokens_each, output_tokens, now, constants, objectives) for worker, pace in workers
    ]
    per_replica = fmean(capacities) if capacities else config.requests_per_replica
    steps = [step_ms(worker, int(per_replica), pace, constants) for worker, pace in workers]
    seconds_each = output_tokens * (fmean(steps) if steps else constants.costs.decode_ms(1)) / 1000
    # A refused request would have stayed for as long as the others do.
    refused = demand.refused_requests * seconds_each
    if not workers and demand.refused_requests > FORGOTTEN:
        # At least one request waits for a first worker, however short its answer.
        refused = max(1.0, refused)
    return Need(sum(worker.requests for worker, _ in workers) + refused, per_replica, "requests at mean output length")


def _capacity(
    worker: CandidateWorker,
    pace: Pace,
    tokens_each: float,
    output_tokens: float,
    now: float,
    constants: Constants,
    objectives: ObjectivesConfig,
) -> float:
    """Requests that the worker can serve at once within its memory and the objective per token, at least one."""
    requests = worker.requests
    token_ms = step_ms(worker, requests, pace, constants)
    growth = growth_tokens(worker, output_tokens, token_ms, now, requests)
    slots = requests + slots_left(tokens_each, growth, worker, requests)
    if objectives.tpot_ms is not None:
        slots = min(slots, constants.costs.requests_within(objectives.tpot_ms / pace.slowness, max(1, slots)))
    return float(max(1, slots))
