"""Keys that queries of a prompt have chosen at random."""

import torch

from kernels.top_tokens import top_tokens


def choose_keys(queries: int, keys: int, count: int, device: torch.device | None = None) -> torch.Tensor:
    """As `top_tokens` returns them: up to `count` of those that each of the last `queries` of the keys sees."""
    seen = torch.arange(keys - queries + 1, keys + 1, dtype=torch.int32, device=device)
    return top_tokens(torch.randn(queries, keys, device=device), seen, count)
