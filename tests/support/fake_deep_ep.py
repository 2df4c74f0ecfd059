"""In place of the package deep_ep: what its legacy Buffer documents, on the CPU, by its communicator alone."""

from typing import Any

import torch

topk_idx_t = torch.int64
Received = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Config:
    def get_nvl_buffer_size_hint(self, row_bytes: int, ranks: int) -> int:
        return row_bytes * ranks

    def get_rdma_buffer_size_hint(self, row_bytes: int, ranks: int) -> int:
        return row_bytes * ranks


class Buffer:
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
        owner = topk_idx // (num_experts // self._ranks)
        is_in_rank = torch.stack([(owner == rank).any(1) for rank in range(self._ranks)], 1)
        per_expert = torch.bincount(topk_idx.flatten(), minlength=num_experts).int()
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
        values, scales = x if isinstance(x, tuple) else (x, None)
        tokens, hidden = values.shape
        assert values.is_contiguous() and values.dtype == (torch.bfloat16 if scales is None else torch.float8_e4m3fn)
        assert topk_weights.dtype == torch.float32 and topk_weights.shape == topk_idx.shape
        assert topk_weights.is_contiguous() and is_token_in_rank.dtype == torch.bool
        assert num_tokens_per_rank.dtype == num_tokens_per_expert.dtype == torch.int32
        sent = [values, topk_idx, topk_weights, is_token_in_rank]
        if scales is not None:
            assert scales.shape == (tokens, hidden // 128) and scales.dtype == torch.float32 and scales.is_contiguous()
            sent.append(scales)
        gathered = [torch.cat(self._of_all(each)) for each in sent]
        chosen = gathered[3][:, self._rank]
        values, experts, weights = (each[chosen] for each in gathered[:3])
        own = len(num_tokens_per_expert) // self._ranks
        local = experts - self._rank * own
        elsewhere = (local < 0) | (local >= own)
        local, weights = local.masked_fill(elsewhere, -1), weights.masked_fill(elsewhere, 0)
        counts = [int((local == expert).sum()) for expert in range(own)]
        received: Received = values if scales is None else (values, gathered[4][chosen])
        return received, local, weights, counts, (chosen, tokens), None

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
