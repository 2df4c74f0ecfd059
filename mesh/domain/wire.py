"""Translates requests, outputs and targets to protos and back; all services use this one translation."""

from array import array

import msgspec
from deepmesh.internal.v1 import constraint_pb2, decode_pb2, outputs_pb2, share_pb2, sparse_prefill_pb2, targets_pb2
from deepmesh.v1 import common_pb2

from mesh.domain.constraints import Constraint
from mesh.domain.outputs import FinishReason, Logprobs, PromptLogprobs
from mesh.domain.requests import StreamTag, Submission, TokenRequest
from mesh.domain.sampling import Sampling, StopConditions
from mesh.domain.shares import MAX_WEIGHT, MIN_WEIGHT, ONE_TENANT, Share
from mesh.domain.sparse_prefill import SparsePrefill
from mesh.domain.targets import StoreTarget, WorkerTarget

# The 32-bit float closest to "only the likeliest token" that is not 0: the wire reads 0 as 1.
SMALLEST_TOP_P = 1e-6

_FINISH_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
}
_BY_NUMBER: dict[int, FinishReason] = {number: reason for reason, number in _FINISH_REASONS.items()}


def submission(message: decode_pb2.Submission) -> Submission:
    """The message as it is; the worker's admission checks it."""
    return Submission(
        stream_id=message.stream_id,
        request=TokenRequest(
            request_id=message.request_id,
            token_ids=list(message.token_ids),
            sampling=sampling(message.sampling),
            stop=StopConditions(message.stop.max_tokens, list(message.stop.token_ids), message.stop.ignore_eos),
            cache_salt=message.cache_salt,
            attempt=message.attempt,
            prompt_tokens=message.prompt_tokens if message.HasField("prompt_tokens") else None,
            constraint=constraint(message.constraint) if message.HasField("constraint") else None,
            share=share(message.share),
            traceparent=message.traceparent or None,
            sparse=sparse_prefill(message.sparse_prefill) if message.HasField("sparse_prefill") else None,
        ),
        deadline_ms=message.deadline_ms or None,
        prefill=worker_target(message.prefill) if message.HasField("prefill") else None,
        store=store_target(message.store) if message.HasField("store") else None,
        stream=stream_tag(message.stream) if message.HasField("stream") else None,
        rank=message.rank if message.HasField("rank") else None,
        prefill_rank=message.prefill_rank if message.HasField("prefill_rank") else None,
    )


def submission_message(submission: Submission) -> decode_pb2.Submission:
    request, stop = submission.request, submission.request.stop
    return decode_pb2.Submission(
        stream_id=submission.stream_id,
        request_id=request.request_id,
        attempt=request.attempt,
        prompt_tokens=request.prompt_tokens,
        token_ids=request.token_ids,
        sampling=sampling_message(request.sampling),
        stop=decode_pb2.StopConditions(
            max_tokens=stop.max_tokens, token_ids=stop.token_ids, ignore_eos=stop.ignore_eos
        ),
        cache_salt=request.cache_salt,
        share=share_message(request.share),
        deadline_ms=submission.deadline_ms,
        prefill=None if submission.prefill is None else worker_target_message(submission.prefill),
        store=None if submission.store is None else store_target_message(submission.store),
        constraint=None if request.constraint is None else constraint_message(request.constraint),
        traceparent=request.traceparent,
        stream=None if submission.stream is None else stream_tag_message(submission.stream),
        sparse_prefill=None if request.sparse is None else sparse_prefill_message(request.sparse),
        rank=submission.rank,
        prefill_rank=submission.prefill_rank,
    )


def stream_tag(message: decode_pb2.StreamTag) -> StreamTag:
    return StreamTag(message.stream_id, message.epoch, message.context)


def stream_tag_message(tag: StreamTag) -> decode_pb2.StreamTag:
    return decode_pb2.StreamTag(stream_id=tag.stream_id, epoch=tag.epoch, context=tag.context)


def constraint(message: constraint_pb2.Constraint) -> Constraint:
    """The message as it is; `check_constraint` checks it."""
    return Constraint(
        message.grammar or None,
        message.free_until if message.HasField("free_until") else None,
        message.opened_by if message.HasField("opened_by") else None,
        message.may_end_free,
        [list(sequence.token_ids) for sequence in message.banned],
        message.min_tokens,
    )


def constraint_message(constraint: Constraint) -> constraint_pb2.Constraint:
    banned = [constraint_pb2.TokenSequence(token_ids=sequence) for sequence in constraint.banned]
    return constraint_pb2.Constraint(**{**msgspec.structs.asdict(constraint), "banned": banned})


def sparse_prefill(message: sparse_prefill_pb2.SparsePrefill) -> SparsePrefill:
    """The message as it is; `check_sparse_prefill` checks it."""
    return SparsePrefill(message.from_tokens, message.recall)


def sparse_prefill_message(sparse: SparsePrefill) -> sparse_prefill_pb2.SparsePrefill:
    return sparse_prefill_pb2.SparsePrefill(from_tokens=sparse.from_tokens, recall=sparse.recall)


def share(message: share_pb2.Share) -> Share:
    """An absent message gives `Share`'s defaults."""
    # A weight that is NaN or not positive would break the fair order for everyone.
    weight = message.weight if MIN_WEIGHT <= message.weight <= MAX_WEIGHT else ONE_TENANT.weight
    return Share(message.tenant, weight, message.priority)


def share_message(share: Share) -> share_pb2.Share:
    return share_pb2.Share(tenant=share.tenant, weight=share.weight, priority=share.priority)


def sampling(message: common_pb2.SamplingParams) -> Sampling:
    """The message as it is; `check_sampling` checks it. Absent fields get `Sampling`'s defaults."""
    given = {field.name: value for field, value in message.ListFields()}
    return Sampling(**{**given, "logit_bias": dict(message.logit_bias)})


def sampling_message(sampling: Sampling) -> common_pb2.SamplingParams:
    fields = {**msgspec.structs.asdict(sampling), "top_p": max(sampling.top_p, SMALLEST_TOP_P)}
    return common_pb2.SamplingParams(**fields)


def finish_reason(number: int) -> FinishReason:
    """A reason that this version does not know counts as a stop."""
    return _BY_NUMBER.get(number, FinishReason.STOP)


def finish_reason_number(reason: FinishReason) -> common_pb2.FinishReason:
    return _FINISH_REASONS[reason]


def logprobs(message: common_pb2.PositionLogprobs) -> Logprobs:
    """With arrays, since a gateway keeps the log probabilities of thousands of tokens for each client that reads late:
    20 alternatives take 0.4 KB a token, in lists 1.6 KB.
    """
    top = message.top
    if not top:
        return Logprobs(message.logprob, (), ())
    return Logprobs(
        message.logprob, array("I", [token.token_id for token in top]), array("f", [token.logprob for token in top])
    )


def logprobs_message(position: Logprobs) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(
        logprob=position.logprob,
        top=[common_pb2.TokenLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in position.top],
    )


def prompt_logprobs(message: outputs_pb2.PromptLogprobs) -> PromptLogprobs:
    """The message as it is; `fits` checks it."""
    return PromptLogprobs(
        message.alternatives, message.logprobs, message.ranks, message.top_token_ids, message.top_logprobs
    )


def prompt_logprobs_message(prompt: PromptLogprobs) -> outputs_pb2.PromptLogprobs:
    return outputs_pb2.PromptLogprobs(**msgspec.structs.asdict(prompt))


def worker_target(message: targets_pb2.WorkerTarget) -> WorkerTarget:
    return WorkerTarget(
        message.worker_id, message.incarnation, message.endpoint, message.slot_bytes or None, message.draft_layers
    )


def worker_target_message(target: WorkerTarget) -> targets_pb2.WorkerTarget:
    return targets_pb2.WorkerTarget(
        worker_id=target.worker_id,
        incarnation=target.incarnation,
        endpoint=target.endpoint,
        slot_bytes=target.slot_bytes,
        draft_layers=target.draft_layers,
    )


def store_target(message: targets_pb2.StoreTarget) -> StoreTarget:
    return StoreTarget(message.store_id, message.blocks)


def store_target_message(target: StoreTarget) -> targets_pb2.StoreTarget:
    return targets_pb2.StoreTarget(store_id=target.store_id, blocks=target.blocks)
