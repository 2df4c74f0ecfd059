"""Prefill attention of MLA in its expanded form: causal multi-head attention with keys wider than values."""

import torch

from kernels.mla_prefill import reference


def mla_prefill(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float) -> torch.Tensor:
    """softmax(scale * query . key) @ value per head; the queries are the last ones of the keys' positions.

    query: [queries, heads, 192]; key: [keys, heads, 192], keys >= queries, cached prefix first; value: [keys, heads,
    128]; any widths, last dimension contiguous, one dtype. Query i sees keys 0 .. keys - queries + i. Returns
    [queries, heads, 128]; no queries give none. Backend: the reference.
    """
    assert query.shape[1:] == key.shape[1:] and key.shape[:2] == value.shape[:2]
    assert key.shape[0] >= query.shape[0] and query.dtype == key.dtype == value.dtype
    return reference.mla_prefill(query, key, value, scale)
