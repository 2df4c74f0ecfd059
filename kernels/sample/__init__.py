"""Draws tokens from logits, and computes log probabilities. Nothing here waits for the device."""

from collections.abc import Sequence

import torch

from kernels.sample import reference
from kernels.sample.draws import Draw, Draws, pack_draws
from kernels.sample.masks import forbid
from kernels.sample.penalties import Penalties, Penalty, add_bias, count_drawn, count_tokens

__all__ = [
    "Draw",
    "Penalty",
    "add_bias",
    "count_drawn",
    "count_tokens",
    "draw",
    "forbid",
    "greedy",
    "is_candidate",
    "logprobs",
    "penalize",
]


def greedy(logits: torch.Tensor, copy: torch.Tensor | None = None, address: torch.Tensor | None = None) -> torch.Tensor:
    """The most likely token of each row, the first of equally likely ones: [rows] int64.

    logits: [rows, vocabulary], float32 or narrower, last dimension contiguous. What is not a number counts as
    minus infinity on a GPU. copy: int64 contiguous, gets the tokens too, as many as it has room for. address: [1] int64
    on a GPU, of memory that the GPU can write, which gets them all: the host may read them there once the kernel has
    ended.
    """
    assert logits.dim() == 2 and logits.stride(1) == 1
    assert copy is None or (copy.dtype == torch.int64 and copy.is_contiguous())
    if logits.is_cuda:
        # Imported here: a machine without a GPU may lack Triton.
        from kernels.sample import triton

        return triton.greedy(logits, copy, address)
    assert address is None
    found = reference.greedy(logits)
    if copy is not None:
        copied = min(len(found), len(copy))
        copy[:copied] = found[:copied]
    return found


def draw(logits: torch.Tensor, draws: Sequence[Draw], positions: torch.Tensor | None = None) -> torch.Tensor:
    """Draw one token a row.

    Apply temperature, then keep the tokens at least `min_p` times as likely as the most likely one, of these the
    `top_k` most likely, and of these the fewest that hold `top_p` of the probability. Among equally likely tokens the
    first are kept. The kept tokens lie on a line in order of token id, and the row's random number picks a point of it.
    That number depends on the row's seed and position alone, so a token does not depend on its batch.

    logits: [rows, vocabulary], any float dtype; one Draw a row; positions: [rows] on the device, in place of those of
    the draws, which the host may not know. Returns [rows] int64.
    """
    assert len(draws) == logits.shape[0] and logits.stride(1) == 1
    packed = Draws.unpack(pack_draws(draws, logits.device))
    if positions is not None:
        packed.position.copy_(positions)
    if logits.is_cuda:
        # Imported here: a machine without a GPU may lack Triton.
        from kernels.sample import triton

        return triton.draw(logits, packed)
    return reference.draw(logits, packed, any(item.filters for item in draws))


def penalize(logits: torch.Tensor, counts: torch.Tensor, penalties: Sequence[Penalty]) -> None:
    """Lower in place the logits of tokens that a row's request already has: repetition first, then presence and
    frequency.

    logits: [rows, vocabulary] float32, contiguous; counts: [slots, vocabulary] int32, from `count_tokens`; one Penalty
    a row.
    """
    assert len(penalties) == logits.shape[0] and logits.dtype == torch.float32 and logits.is_contiguous()
    assert counts.shape[1] == logits.shape[1] and counts.dtype == torch.int32 and counts.is_contiguous()
    if not penalties:
        return
    packed = Penalties.pack(penalties, logits.device)
    if logits.is_cuda:
        # Imported here: a machine without a GPU may lack Triton.
        from kernels.sample import triton

        triton.penalize(logits, counts, packed)
    else:
        reference.penalize(logits, counts, packed)


def logprobs(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    """Natural log probabilities at temperature 1.

    logits: [rows, vocabulary]; token_ids: [rows] int64. Returns (log probabilities of token_ids [rows] float32,
    the `count` most likely token ids [rows, count] int64, their log probabilities [rows, count] float32), best first.
    Backend: the reference.
    """
    assert token_ids.shape == logits.shape[:1] and 0 <= count <= logits.shape[1]
    return reference.logprobs(logits, token_ids, count)


def is_candidate(logits: torch.Tensor, token_ids: torch.Tensor, top_n: int, delta: float) -> torch.Tensor:
    """Whether each row's token is among the `top_n` most likely ones, and at most `delta` less likely than the first.

    Probabilities are those at temperature 1; of equally likely tokens all count as the first of them. A token whose
    logit is minus infinity is no candidate. logits: [rows, vocabulary]; token_ids: [rows] int64. Returns [rows] bool.
    Backend: the reference.
    """
    assert token_ids.shape == logits.shape[:1]
    return reference.is_candidate(logits, token_ids, top_n, delta)
