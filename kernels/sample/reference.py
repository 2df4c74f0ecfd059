"""Sampling in plain torch, the definition."""

import torch


def greedy(logits: torch.Tensor) -> list[int]:
    return logits.argmax(dim=1).tolist()


def draw(logits: torch.Tensor, temperature: float, top_k: int, top_p: float, number: float) -> int:
    # Float64, and the largest logit at 0: the coldest temperature cannot overflow.
    logits = logits.double()
    probabilities = torch.softmax((logits - logits.max()) / temperature, dim=0)
    if not top_k and top_p >= 1:
        return _invert(probabilities, number)
    ordered, token_ids = probabilities.sort(descending=True, stable=True)
    if top_k:
        ordered, token_ids = ordered[:top_k], token_ids[:top_k]
    mass = ordered.cumsum(0)
    # Whatever lies before it holds less than top_p: the token that crosses the line stays.
    kept = mass - ordered < top_p * mass[-1]
    return int(token_ids[_invert(ordered[kept], number)])


def _invert(probabilities: torch.Tensor, number: float) -> int:
    """The first index whose cumulative share exceeds `number`, which is below 1."""
    mass = probabilities.cumsum(0)
    return int(torch.searchsorted(mass, number * mass[-1], right=True))


def logprobs(logits: torch.Tensor, token_id: int, count: int) -> tuple[float, list[int], list[float]]:
    every = torch.log_softmax(logits.float(), dim=0)
    best = every.topk(count)
    return float(every[token_id]), best.indices.tolist(), best.values.tolist()
