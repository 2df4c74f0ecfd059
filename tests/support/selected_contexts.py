"""Random queries, and their selections, over contexts in a pool that is poisoned everywhere else."""

import torch

from kernels.mla_decode import plan_decode
from kernels.top_tokens import top_tokens
from tests.support.latents import scattered_contexts

SCALE, KV_SCALE = 0.12, 0.5


class SelectedContexts:
    def __init__(
        self,
        lengths: list[int],
        query_tokens: int,
        count: int,
        heads: int,
        widths: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """dtype: of the pool; that of queries is bfloat16 unless both are float32."""
        self.value_width, width = widths
        self.kv_scale = KV_SCALE if dtype == torch.float8_e4m3fn else 1.0
        stored = scattered_contexts([length + query_tokens - 1 for length in lengths], width)
        self.pool = (stored.pool / self.kv_scale).to(dtype).to(device)
        queries = torch.float32 if dtype == torch.float32 else torch.bfloat16
        self.query = torch.randn(len(lengths) * query_tokens, heads, width, device=device).to(queries)
        self.plan = plan_decode(stored.block_table.to(device), stored.lengths.to(device), query_tokens)
        own = torch.arange(1 - query_tokens, 1, dtype=torch.int32)
        self.seen = (stored.lengths.unsqueeze(1) + own).flatten()
        scores = torch.randn(len(self.query), 64 * stored.block_table.shape[1])
        self.tokens = top_tokens(scores.to(device), self.seen.to(device), count)
        self.contexts = stored.contexts

    def error(self, found: torch.Tensor) -> float:
        """Relative norm of the difference from float64, query by query."""
        device = found.device
        rounded = [(context.to(device) / self.kv_scale).to(self.pool.dtype).double() for context in self.contexts]
        expected = []
        for number, (query, tokens) in enumerate(zip(self.query.double(), self.tokens, strict=True)):
            latents = rounded[number // self.plan.query_tokens][tokens[tokens >= 0].long()] * self.kv_scale
            weights = torch.softmax(query @ latents.t() * SCALE, dim=1)
            expected.append(weights @ latents[:, : self.value_width])
        wanted = torch.stack(expected)
        assert found.dtype == self.query.dtype and found.shape == wanted.shape
        return float((found.double() - wanted).norm() / wanted.norm())
