"""The messages between the services of a worker's hosts, as protos."""

from collections.abc import Mapping

from deepmesh.internal.v1 import hosts_pb2

from engine.protocol.pulse import LoopProgress


def join(worker_id: str, host: int, engine: bytes, version: str) -> hosts_pb2.JoinWorkerRequest:
    joining = hosts_pb2.Join(worker_id=worker_id, host=host, engine=engine, version=version)
    return hosts_pb2.JoinWorkerRequest(join=joining)


def from_rank(rank: int, data: bytes) -> hosts_pb2.JoinWorkerRequest:
    return hosts_pb2.JoinWorkerRequest(from_rank=hosts_pb2.RankBytes(rank=rank, data=data))


def ended(rank: int, status: int) -> hosts_pb2.JoinWorkerRequest:
    return hosts_pb2.JoinWorkerRequest(ended=hosts_pb2.RankEnd(rank=rank, status=status))


def progress(ranks: Mapping[int, LoopProgress]) -> hosts_pb2.JoinWorkerRequest:
    told = [hosts_pb2.RankProgress(rank=rank, **each._asdict()) for rank, each in ranks.items()]
    return hosts_pb2.JoinWorkerRequest(progress=hosts_pb2.RanksProgress(ranks=told))


def progress_of(told: hosts_pb2.RankProgress) -> LoopProgress:
    return LoopProgress(**{name: getattr(told, name) for name in LoopProgress._fields})


def record_from_host(record: bytes) -> hosts_pb2.JoinWorkerRequest:
    return hosts_pb2.JoinWorkerRequest(record=record)


def stopping() -> hosts_pb2.JoinWorkerRequest:
    return hosts_pb2.JoinWorkerRequest(stopping=hosts_pb2.Stopping())


def to_rank(rank: int, data: bytes) -> hosts_pb2.JoinWorkerResponse:
    return hosts_pb2.JoinWorkerResponse(to_rank=hosts_pb2.RankBytes(rank=rank, data=data))


def kill(rank: int) -> hosts_pb2.JoinWorkerResponse:
    return hosts_pb2.JoinWorkerResponse(kill=hosts_pb2.KillRank(rank=rank))


def record_to_host(record: bytes) -> hosts_pb2.JoinWorkerResponse:
    return hosts_pb2.JoinWorkerResponse(record=record)
