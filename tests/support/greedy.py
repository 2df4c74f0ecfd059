"""Compares answers with what transformers computes from the same weights."""

import torch
from transformers import PreTrainedModel

# If the best two logits are closer than this, rounding may decide.
MARGIN = 1e-3


@torch.inference_mode()
def assert_greedy(reference: PreTrainedModel, prompt: list[int], answer: list[int]) -> None:
    """Assert that each token is the best one after those before it, up to rounding."""
    logits = reference(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
    assert (logits.max(dim=1).values - chosen).max() < MARGIN
