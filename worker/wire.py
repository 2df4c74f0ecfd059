"""What both kinds of worker say in the protos: sampling, log probabilities, stores, status. No rank imports it."""

from deepmesh.internal.v1 import scheduler_pb2, targets_pb2
from deepmesh.v1 import common_pb2

from engine.protocol.messages import Fetch, Logprobs, Sampling
from mesh import worker_wire
from mesh.workers import WorkerIdentity, WorkerState
from worker.status_report import Report


def sampling(message: common_pb2.SamplingParams) -> Sampling:
    """The message as it is; `worker.acceptance` judges it."""
    return Sampling(
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        seed=message.seed,
        top_logprobs=message.top_logprobs if message.HasField("top_logprobs") else None,
    )


def sampling_message(sampling: Sampling) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        top_logprobs=sampling.top_logprobs,
    )


def logprobs(message: common_pb2.PositionLogprobs) -> Logprobs:
    return Logprobs(
        message.logprob, [token.token_id for token in message.top], [token.logprob for token in message.top]
    )


def logprobs_message(position: Logprobs) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(
        logprob=position.logprob,
        top=[
            common_pb2.TokenLogprob(token_id=token_id, logprob=logprob)
            for token_id, logprob in zip(position.top_token_ids, position.top_logprobs, strict=True)
        ],
    )


def fetch(message: targets_pb2.StoreTarget) -> Fetch:
    return Fetch(message.store_id, message.blocks)


def fetch_message(fetch: Fetch) -> targets_pb2.StoreTarget:
    return targets_pb2.StoreTarget(store_id=fetch.store_id, blocks=fetch.blocks)


def status_message(report: Report, sender: WorkerIdentity | None) -> scheduler_pb2.ReportStatusRequest:
    """`sender` is given in a stream's first message."""
    message = scheduler_pb2.ReportStatusRequest(
        identity=worker_wire.identity_message(sender) if sender else None,
        state=worker_wire.state_name(WorkerState.DRAINING if report.draining else WorkerState.SERVING),
        load=worker_wire.load_message(report.load),
        transfers=worker_wire.transfers_message(report.transfers),
    )
    if report.snapshot or report.stored or report.removed:
        events = scheduler_pb2.KvEvents(snapshot=report.snapshot, stored=report.stored, removed=report.removed)
        message.kv_events.CopyFrom(events)
    return message
