"""Stands in for the package deep_ep: its ElasticBuffer as documented, on the CPU. Ranks are threads of one process."""

from collections.abc import Sequence
from itertools import count
from threading import Barrier
from typing import Any, ClassVar

import torch

topk_idx_t = torch.int64
Received = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


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


class Event:
    """EventOverlap: what it stands for is over."""

    def current_stream_wait(self) -> None:
        pass


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
        async_with_compute_stream: bool,
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
        return received, _with_room(local[sources], size), _with_room(weights[sources], size), handle, Event()

    def combine(
        self, x: torch.Tensor, handle: Handle, *, async_with_compute_stream: bool
    ) -> tuple[torch.Tensor, None, "Event"]:
        assert x.dtype == torch.bfloat16 and x.is_contiguous() and x.shape == (handle.most, self._hidden)
        spread = torch.zeros(sum(handle.tokens), self._hidden)
        spread[handle.sources] = x[: len(handle.sources)].float()
        total = torch.stack(self._comm.all_gather(self._rank, spread)).sum(0).bfloat16()
        return total.split(list(handle.tokens))[self._rank], None, Event()


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
    padding = 0x7F if rows.is_floating_point() else 0
    room = torch.full((size, *rows.shape[1:], rows.itemsize), padding, dtype=torch.uint8).view(rows.dtype).squeeze(-1)
    room[: len(rows)] = rows
    return room
