"""The tokens with the highest scores, exactly."""

import torch

from kernels.top_tokens import reference

# Stands where a query sees fewer tokens than are wanted: tensors have no None.
NO_TOKEN = reference.NO_TOKEN


def top_tokens(scores: torch.Tensor, seen: torch.Tensor, count: int) -> torch.Tensor:
    """By query the positions of its `count` highest scores, ascending: [queries, count] int32. Of equal scores those of
    earlier positions are taken. A query that sees fewer tokens has all of them, and NO_TOKEN after them.

    scores: [queries, positions] float32 contiguous, none of them NaN; seen: [queries] int32, the leading positions that
    a query sees; what is after them is not read. count: at least 1. No queries give no positions.
    """
    assert scores.dtype == torch.float32 and scores.is_contiguous() and count >= 1
    assert seen.shape == scores.shape[:1] and seen.dtype == torch.int32
    if scores.is_cuda:
        # Imported here: a machine without a GPU may lack Triton and CUDA's bindings.
        from kernels.top_tokens import clusters, short_rows, triton

        if short_rows.takes(scores):
            return short_rows.top_tokens(scores, seen, count)
        if clusters.takes(scores):
            return clusters.top_tokens(scores, seen, count)
        return triton.top_tokens(scores, seen, count)
    return reference.top_tokens(scores, seen, count)
