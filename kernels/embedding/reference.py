"""Embeddings in plain torch: the definition."""

import torch
from torch.nn import functional


def embed(
    token_ids: torch.Tensor, table: torch.Tensor, first: int, residual_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    residual = table.new_zeros(residual_rows, table.shape[1])
    foreign = (token_ids < first) | (token_ids >= first + len(table))
    found = functional.embedding((token_ids - first).masked_fill(foreign, 0), table)
    return found.masked_fill(foreign.unsqueeze(1), 0), residual
