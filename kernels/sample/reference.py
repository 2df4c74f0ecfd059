"""Sampling in plain torch: the definition."""

import torch

from kernels.sample.draws import Draws
from kernels.sample.penalties import IN_PROMPT, Penalties
from kernels.sample.philox import uniform


def greedy(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(dim=1)


def draw(logits: torch.Tensor, draws: Draws, filtered: bool) -> torch.Tensor:
    """filtered: whether some row excludes tokens."""
    if not logits.shape[0]:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    # In float64 and with the largest logit at 0, the lowest temperature cannot overflow.
    logits = logits.double()
    logits = (logits - logits.amax(dim=1, keepdim=True)) / draws.temperature.unsqueeze(1)
    probabilities = torch.softmax(logits, dim=1)
    if filtered:
        probabilities = probabilities * _kept(probabilities, draws)
    mass = probabilities.cumsum(1)
    point = uniform(draws.seed, draws.position).unsqueeze(1) * mass[:, -1:]
    # The first token whose cumulative mass exceeds the point.
    return torch.searchsorted(mass, point, right=True).squeeze(1)


def _kept(probabilities: torch.Tensor, draws: Draws) -> torch.Tensor:
    """Whether each token is kept: [rows, vocabulary] bool."""
    ordered, token_ids = probabilities.sort(dim=1, descending=True, stable=True)
    rank = torch.arange(ordered.shape[1], device=ordered.device)
    top_k, top_p, min_p = (each.unsqueeze(1) for each in (draws.top_k, draws.top_p, draws.min_p))
    within = (ordered >= min_p * ordered[:, :1]) & ((top_k == 0) | (rank < top_k))
    ordered = ordered * within
    mass = ordered.cumsum(1)
    # A token is kept if the ones before it hold less than top_p: the token that crosses the line is kept too.
    within &= (top_p >= 1) | (mass - ordered < top_p * mass[:, -1:])
    return torch.empty_like(within).scatter_(1, token_ids, within)


def logprobs(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
    every = torch.log_softmax(logits.float(), dim=1)
    best = every.topk(count, dim=1)
    return every.gather(1, token_ids.unsqueeze(1)).squeeze(1), best.indices, best.values


def is_candidate(logits: torch.Tensor, token_ids: torch.Tensor, top_n: int, delta: float) -> torch.Tensor:
    probabilities = torch.softmax(logits.float(), dim=1)
    own = probabilities.gather(1, token_ids.unsqueeze(1))
    rank = (probabilities > own).sum(1)
    allowed = logits.gather(1, token_ids.unsqueeze(1)).squeeze(1) > -torch.inf
    return allowed & (rank < top_n) & (own.squeeze(1) >= probabilities.amax(1) - delta)


def penalize(logits: torch.Tensor, counts: torch.Tensor, penalties: Penalties) -> None:
    found = counts[penalties.slot]
    generated = found & (IN_PROMPT - 1)
    repetition, presence, frequency = (
        each.unsqueeze(1) for each in (penalties.repetition, penalties.presence, penalties.frequency)
    )
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    lowered = frequency * generated + presence * (generated > 0)
    logits.copy_(torch.where(found > 0, repeated, logits) - lowered)
