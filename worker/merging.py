"""Merges the reports of a worker's ranks into one. Pure; the report of a single rank stays as it is."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from engine.protocol.messages import Ready
from mesh.blocks import BLOCK_TOKENS
from mesh.domain.workers import HostTierStatus, PromptPace, TransferCounters, WorkerLoad, WorkerSpeed
from mesh.errors import CheckpointError


def merge_ready(ranks: Sequence[Ready], names: Sequence[str]) -> Ready:
    """The ranks' descriptions as one. Blocks and requests add up; the smallest pool bounds the context, since a request
    lies on one rank. names: what errors call the ranks.

    Raises CheckpointError if the ranks have loaded different models, which can happen on several hosts.
    """
    first = ranks[0]
    if len(ranks) == 1:
        return first
    expected = _model_of(first)
    for rank, name in zip(ranks, names, strict=True):
        for key, theirs in _model_of(rank).items():
            if theirs != expected[key]:
                raise CheckpointError(
                    f"{name} has loaded another model than {names[0]}: its {key} is {theirs}, and not {expected[key]};"
                    " all hosts of a worker must have the same checkpoint"
                )
    least_blocks = min(rank.total_blocks for rank in ranks)
    return msgspec.structs.replace(
        first,
        context_tokens=min(least_blocks * BLOCK_TOKENS, *(rank.context_tokens for rank in ranks)),
        total_blocks=sum(rank.total_blocks for rank in ranks),
        max_requests=sum(rank.max_requests for rank in ranks),
        peak_bytes=sum(rank.peak_bytes for rank in ranks),
        speed=_merge_speeds([rank.speed for rank in ranks]),
        # The ranks load in parallel.
        start_seconds={
            phase: max(rank.start_seconds.get(phase, 0.0) for rank in ranks) for phase in first.start_seconds
        },
    )


def _model_of(rank: Ready) -> Mapping[str, object]:
    """What is the same for all ranks of a model."""
    sizes = {"model": rank.model, "vocabulary_size": rank.vocabulary_size, "block_bytes": rank.block_bytes}
    return {**msgspec.structs.asdict(rank.namespace), **sizes}


def merge_loads(ranks: Sequence[WorkerLoad]) -> WorkerLoad:
    """Sums; but step times, answer lengths and the rate of a push are means over the ranks that know them."""
    if len(ranks) == 1:
        return ranks[0]
    return WorkerLoad(
        running_requests=sum(rank.running_requests for rank in ranks),
        waiting_requests=sum(rank.waiting_requests for rank in ranks),
        queued_prefill_tokens=sum(rank.queued_prefill_tokens for rank in ranks),
        free_blocks=sum(rank.free_blocks for rank in ranks),
        prefill_tokens_per_second=_sum_of_known(rank.prefill_tokens_per_second for rank in ranks),
        decode_step_ms=_mean_of_known(rank.decode_step_ms for rank in ranks),
        mean_output_tokens=_mean_of_known(rank.mean_output_tokens for rank in ranks),
        decode_step_requests=_sum_of_known(rank.decode_step_requests for rank in ranks),
        push_bytes_per_second=_mean_of_known(rank.push_bytes_per_second for rank in ranks),
        exact_prompts=_merge_paces([rank.exact_prompts for rank in ranks]),
        sparse_prompts=_merge_paces([rank.sparse_prompts for rank in ranks]),
        queued_sparse_tokens=sum(rank.queued_sparse_tokens for rank in ranks),
        waiting_blocks=sum(rank.waiting_blocks for rank in ranks),
        host_tier=_merge_host_tiers([rank.host_tier for rank in ranks if rank.host_tier is not None]),
    )


def _merge_speeds(ranks: Sequence[WorkerSpeed | None]) -> WorkerSpeed | None:
    """The slowest rank's, since ranks that step together wait for it; None if one is unknown."""
    known = [speed for speed in ranks if speed is not None]
    if len(known) < len(ranks):
        return None
    steps = max(known, key=lambda speed: speed.decode_step_ms)
    prompts = min((speed.prompts for speed in known), key=lambda pace: pace.tokens_per_second)
    return msgspec.structs.replace(steps, prompts=prompts)


def merge_transfers(ranks: Sequence[TransferCounters]) -> TransferCounters:
    """Sums; but the rate of a fetch is a mean over the ranks that know it."""
    if len(ranks) == 1:
        return ranks[0]
    return TransferCounters(
        open_landings=sum(rank.open_landings for rank in ranks),
        open_pushes=sum(rank.open_pushes for rank in ranks),
        open_fetches=sum(rank.open_fetches for rank in ranks),
        total_slots=sum(rank.total_slots for rank in ranks),
        free_slots=sum(rank.free_slots for rank in ranks),
        quarantined_slots=sum(rank.quarantined_slots for rank in ranks),
        received_bytes=_sum_by_name(rank.received_bytes for rank in ranks),
        sent_bytes=_sum_by_name(rank.sent_bytes for rank in ranks),
        local_tcp_bytes=_sum_by_name(rank.local_tcp_bytes for rank in ranks),
        refused=_sum_by_name(rank.refused for rank in ranks),
        fetches=sum(rank.fetches for rank in ranks),
        fetched_blocks=sum(rank.fetched_blocks for rank in ranks),
        fetch_bytes_per_second=_mean_of_known(rank.fetch_bytes_per_second for rank in ranks),
        disk_fetch_bytes_per_second=_mean_of_known(rank.disk_fetch_bytes_per_second for rank in ranks),
    )


def _merge_host_tiers(ranks: Sequence[HostTierStatus]) -> HostTierStatus | None:
    """Sums; but the rate of a read is a mean over the ranks that know it."""
    if not ranks:
        return None
    return HostTierStatus(
        total_blocks=sum(rank.total_blocks for rank in ranks),
        used_blocks=sum(rank.used_blocks for rank in ranks),
        written_blocks=sum(rank.written_blocks for rank in ranks),
        read_blocks=sum(rank.read_blocks for rank in ranks),
        read_bytes_per_second=_mean_of_known(rank.read_bytes_per_second for rank in ranks),
    )


def _merge_paces(paces: Sequence[PromptPace | None]) -> PromptPace | None:
    """The sum of the known rates, at the mean context of their tokens and in steps of the mean size."""
    known = [pace for pace in paces if pace is not None]
    if not known:
        return None
    rate = sum(pace.tokens_per_second for pace in known)
    context_tokens = sum(pace.context_tokens * pace.tokens_per_second for pace in known) / rate
    steps_per_second = 0.0
    for pace in known:
        if pace.step_tokens is None:
            return PromptPace(rate, context_tokens)
        steps_per_second += pace.tokens_per_second / pace.step_tokens
    return PromptPace(rate, context_tokens, rate / steps_per_second)


def _mean_of_known(values: Iterable[float | None]) -> float | None:
    """The mean of the known values; None if no rank knows."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _sum_of_known(values: Iterable[float | None]) -> float | None:
    """The sum of the known values; None if no rank knows."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _sum_by_name(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)
