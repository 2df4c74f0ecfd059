"""Masks of tokens that rows may draw."""

import numpy as np
import pytest
import torch

from kernels.sample import forbid


@pytest.mark.parametrize("vocabulary", [8, 61, 1000])
def test_only_rows_with_a_mask_lose_tokens(vocabulary: int) -> None:
    generator = np.random.default_rng(vocabulary)
    logits = torch.from_numpy(generator.normal(size=(5, vocabulary)).astype(np.float32))
    allowed = generator.integers(0, 2, (2, vocabulary)).astype(bool)
    expected = logits.clone()
    expected[1][torch.from_numpy(~allowed[0])] = -torch.inf
    expected[4][torch.from_numpy(~allowed[1])] = -torch.inf
    forbid(logits, [1, 4], np.packbits(allowed, axis=1, bitorder="little"))
    assert torch.equal(logits, expected)
