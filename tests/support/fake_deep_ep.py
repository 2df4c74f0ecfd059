"""Stands in for the package deep_ep: its buffers as documented, on the CPU. Ranks are threads of one process."""

from collections.abc import Sequence
from itertools import count
from threading import Barrier
from typing import Any, ClassVar

import torch

topk_idx_t = torch.int64
Received = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Config:
    def get_nvl_buffer_size_hint(self, row_bytes: int, ranks: int) -> int:
        return row_bytes * ranks

    def get_rdma_buffer_size_hint(self, row_bytes: int, ranks: int) -> int:
        return row_bytes * ranks


class Buffer:
    """The class of deep_ep/buffers/legacy.py, used for its communicator alone."""

    # How often any rank dispatched.
    dispatches = 0

    def __init__(
        self, group: None, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, *, comm: Any = None, **more: object
    ) -> None:
        assert group is None and not more and num_nvl_bytes > 0 and num_rdma_bytes > 0
        self._comm, self._rank, self._ranks = comm, comm.Get_rank(), comm.Get_size()
        handle = bytearray([self._rank] * 64)
        assert comm.allgather(handle) == [bytearray([rank] * 64) for rank in range(self._ranks)]
        assert comm.allgather(self._rank) == list(range(self._ranks))
        root = bytearray(b"root") if self._rank == 0 else None
        assert comm.allgather(root) == [bytearray(b"root"), *[None] * (self._ranks - 1)]

    @staticmethod
    def get_dispatch_config(ranks: int) -> Config:
        return Config()

    @staticmethod
    def get_combine_config(ranks: int) -> Config:
        return Config()

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int) -> tuple[Any, ...]:
        assert topk_idx.dtype == topk_idx_t and topk_idx.dim() == 2 and topk_idx.is_contiguous()
        assert num_experts % self._ranks == 0
        owner = topk_idx.div(num_experts // self._ranks, rounding_mode="floor")
        is_in_rank = torch.stack([(owner == rank).any(1) for rank in range(self._ranks)], 1)
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return is_in_rank.sum(0).int(), is_in_rank.sum(0).int(), per_expert, is_in_rank, None

    def dispatch(
        self,
        x: Received,
        *,
        num_tokens_per_rank: torch.Tensor,
        num_tokens_per_rdma_rank: torch.Tensor,
        is_token_in_rank: torch.Tensor,
        num_tokens_per_expert: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
    ) -> tuple[Any, ...]:
        Buffer.dispatches += 1
        assert is_token_in_rank.dtype == torch.bool
        assert num_tokens_per_rank.dtype == num_tokens_per_expert.dtype == torch.int32
        sent = _sent(x, topk_idx, topk_weights)
        gathered = [torch.cat(self._of_all(each)) for each in (is_token_in_rank, *sent)]
        chosen = gathered[0][:, self._rank]
        local, weights, *rows = (each[chosen] for each in gathered[1:])
        own = len(num_tokens_per_expert) // self._ranks
        local = _local(local, own, self._rank)
        counts = [int((local == expert).sum()) for expert in range(own)]
        received: Received = rows[0] if len(rows) == 1 else (rows[0], rows[1])
        return received, local, weights.masked_fill(local < 0, 0), counts, (chosen, len(topk_idx)), None

    def combine(self, x: torch.Tensor, handle: tuple[torch.Tensor, int]) -> tuple[torch.Tensor, None, None]:
        chosen, tokens = handle
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and len(x) == int(chosen.sum())
        spread = torch.zeros(len(chosen), x.shape[1])
        spread[chosen] = x.float()
        total = torch.stack(self._of_all(spread)).sum(0).bfloat16()
        return total[self._rank * tokens :][:tokens], None, None

    def _of_all(self, values: torch.Tensor) -> list[torch.Tensor]:
        bytes_of_all = self._comm.allgather(bytearray(values.contiguous().view(-1).view(torch.uint8).numpy().tobytes()))
        return [torch.frombuffer(each, dtype=values.dtype).view(-1, *values.shape[1:]) for each in bytes_of_all]


class Communicator:
    """Stands in for NCCL's communicator of all ranks."""

    def __init__(self, ranks: int) -> None:
        self._barrier = Barrier(ranks, timeout=20)
        self._given: list[Any] = [None] * ranks

    def all_gather(self, rank: int, values: Any) -> list[Any]:
        self._given[rank] = values
        self._barrier.wait()
        given = list(self._given)
        self._barrier.wait()
        return given


class _C:
    """The package's compiled part."""

    communicators: ClassVar[dict[int, Communicator]] = {}
    _ids = count()

    @classmethod
    def get_local_nccl_unique_id(cls) -> bytearray:
        return bytearray(next(cls._ids).to_bytes(128, "big"))

    @classmethod
    def create_nccl_comm(cls, unique_id: bytearray, ranks: int, rank: int) -> int:
        assert isinstance(unique_id, bytearray) and 0 <= rank < ranks
        number = int.from_bytes(unique_id, "big")
        cls.communicators.setdefault(number, Communicator(ranks))
        return number


class Handle:
    """EPHandle. sources: for each row that arrived, its number among the rows of all ranks."""

    def __init__(self, sources: torch.Tensor, tokens: Sequence[int], most: int) -> None:
        self.sources, self.tokens, self.most = sources, tokens, most
        ends = torch.tensor(tokens).cumsum(0)
        self.psum_num_recv_tokens_per_scaleup_rank = torch.stack([(sources < end).sum() for end in ends]).int()


class ElasticBuffer:
    """The class of deep_ep/buffers/elastic.py, without expansion and caching. Rows arrive in any order."""

    # How often any rank dispatched.
    dispatches = 0

    def __init__(
        self,
        group: Any,
        *,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int,
        prefer_overlap_with_compute: bool,
        explicitly_destroy: bool,
    ) -> None:
        self._rank, self._ranks = group.rank(), group.size()
        self._most, self._hidden, self._choices = num_max_tokens_per_rank, hidden, num_topk
        self._comm = _C.communicators[group._get_backend(torch.device("cuda"))._comm_ptr()]
        assert self._comm.all_gather(self._rank, self._rank) == list(range(self._ranks))
        group.barrier()

    def dispatch(
        self,
        x: Received,
        *,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_experts: int,
        num_max_tokens_per_rank: int,
        num_sms: int,
        do_cpu_sync: bool,
    ) -> tuple[Any, ...]:
        ElasticBuffer.dispatches += 1
        assert 0 < len(topk_idx) <= num_max_tokens_per_rank <= self._most and num_experts % self._ranks == 0
        assert topk_idx.shape[1] == self._choices and num_sms > 0 and num_sms % 2 == 0
        sent = _sent(x, topk_idx, topk_weights)
        assert sent[2].shape[1] == self._hidden
        of_all = self._comm.all_gather(self._rank, (num_max_tokens_per_rank, sent))
        assert len({most for most, _ in of_all}) == 1
        tokens = [len(parts[0]) for _, parts in of_all]
        choices, weights, *rows = (torch.cat(parts) for parts in zip(*(parts for _, parts in of_all), strict=True))
        local = _local(choices, num_experts // self._ranks, self._rank)
        sources = (local >= 0).any(1).nonzero()[:, 0]
        owner = torch.arange(self._ranks).repeat_interleave(torch.tensor(tokens))[sources]
        sources = sources[(owner + torch.rand(len(sources))).argsort()]
        size = len(sources) if do_cpu_sync else self._ranks * num_max_tokens_per_rank
        found = [_with_room(each[sources], size) for each in rows]
        received: Received = found[0] if len(found) == 1 else (found[0], found[1])
        handle = Handle(sources, tokens, size)
        return received, _with_room(local[sources], size), _with_room(weights[sources], size), handle, None

    def combine(self, x: torch.Tensor, handle: Handle) -> tuple[torch.Tensor, None, None]:
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape == (handle.most, self._hidden)
        spread = torch.zeros(sum(handle.tokens), self._hidden)
        spread[handle.sources] = x[: len(handle.sources)].float()
        total = torch.stack(self._comm.all_gather(self._rank, spread)).sum(0).bfloat16()
        return total.split(list(handle.tokens))[self._rank], None, None


def _sent(x: Received, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> list[torch.Tensor]:
    """Choices, weights and rows unchanged, after the package's checks."""
    values, scales = x if isinstance(x, tuple) else (x, None)
    tokens, hidden = values.shape
    assert values.is_contiguous() and values.dtype == (torch.bfloat16 if scales is None else torch.float8_e4m3fn)
    assert topk_idx.dtype == topk_idx_t and topk_idx.is_contiguous() and len(topk_idx) == tokens
    assert topk_weights.dtype == torch.float32 and topk_weights.shape == topk_idx.shape and topk_weights.is_contiguous()
    # The package's kernels hang if a row chooses an expert twice.
    assert all(len(set(row)) == len(row) for row in ([each for each in row if each >= 0] for row in topk_idx.tolist()))
    if scales is None:
        return [topk_idx, topk_weights, values]
    assert scales.shape == (tokens, hidden // 128) and scales.dtype == torch.float32 and scales.is_contiguous()
    return [topk_idx, topk_weights, values, scales]


def _local(choices: torch.Tensor, own: int, rank: int) -> torch.Tensor:
    """Choices as numbers counted from the rank's first expert; -1 for experts of other ranks."""
    local = choices - rank * own
    return local.masked_fill((local < 0) | (local >= own), -1)


def _with_room(rows: torch.Tensor, size: int) -> torch.Tensor:
    """The rows in a larger tensor. Garbage follows them: large values, or the rank's first expert."""
    behind = 0x7F if rows.is_floating_point() else 0
    room = torch.full((size, *rows.shape[1:], rows.itemsize), behind, dtype=torch.uint8).view(rows.dtype).squeeze(-1)
    room[: len(rows)] = rows
    return room
