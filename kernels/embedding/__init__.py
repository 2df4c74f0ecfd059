"""Embeddings of tokens, and the residual of zeros that they are added to."""

import torch

from kernels.embedding import reference


def embed(
    token_ids: torch.Tensor, table: torch.Tensor, first: int, residual_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """token_ids: [tokens] int64 contiguous; table: [vocabulary, width] contiguous, of tokens from `first` on.

    Returns [tokens, width], zeros for a token that the table does not have, and zeros [residual_rows, width], both of
    the table's dtype. No tokens give none.
    """
    assert token_ids.dtype == torch.int64 and token_ids.is_contiguous() and table.is_contiguous()
    if token_ids.is_cuda:
        # Imported here: a machine without a GPU may lack Triton.
        from kernels.embedding import triton

        return triton.embed(token_ids, table, first, residual_rows)
    return reference.embed(token_ids, table, first, residual_rows)
