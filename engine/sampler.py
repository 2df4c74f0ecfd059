"""From logits to the samples of a step."""

from collections.abc import Sequence

import torch

from engine.batch import Row, Sample
from engine.messages import Logprobs, Sampling
from kernels.sample import Draw, draw, greedy, logprobs


def sample_rows(logits: torch.Tensor, rows: Sequence[Row]) -> list[Sample]:
    """One sample per row, all of which have `sampling`. logits: [rows, vocabulary]."""
    assert logits.shape[0] == len(rows)
    token_ids = greedy(logits)
    drawn = {index: _draw(row.sampling, row.end) for index, row in enumerate(rows) if _is_random(row.sampling)}
    if drawn:
        for index, token_id in zip(drawn, draw(logits[list(drawn)], list(drawn.values())), strict=True):
            token_ids[index] = token_id
    return [
        Sample(token_id=token_id, logprobs=_logprobs(logits[index], row.sampling, token_id))
        for index, (row, token_id) in enumerate(zip(rows, token_ids, strict=True))
    ]


def _is_random(sampling: Sampling | None) -> bool:
    assert sampling is not None
    return sampling.temperature > 0


def _draw(sampling: Sampling | None, position: int) -> Draw:
    assert sampling is not None
    return Draw(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        position=position,
    )


def _logprobs(logits: torch.Tensor, sampling: Sampling | None, token_id: int) -> Logprobs | None:
    if sampling is None or sampling.top_logprobs is None:
        return None
    chosen, top_token_ids, top_logprobs = logprobs(logits, token_id, min(sampling.top_logprobs, len(logits)))
    return Logprobs(logprob=chosen, top_token_ids=top_token_ids, top_logprobs=top_logprobs)
