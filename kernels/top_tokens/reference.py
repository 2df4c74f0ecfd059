"""The choice of the highest scores in plain torch: the definition."""

import torch

NO_TOKEN = -1


def top_tokens(scores: torch.Tensor, seen: torch.Tensor, count: int) -> torch.Tensor:
    queries, width = scores.shape
    position = torch.arange(width, device=scores.device)
    unseen = position >= seen.unsqueeze(1)
    ranked = scores.masked_fill(unseen, float("-inf")).sort(dim=1, descending=True, stable=True).indices[:, :count]
    # Positions that are not seen sort after all others.
    chosen = ranked.masked_fill(unseen.gather(1, ranked), width).sort(dim=1).values
    out = torch.full((queries, count), NO_TOKEN, dtype=torch.int32, device=scores.device)
    out[:, : chosen.shape[1]] = chosen.masked_fill(chosen == width, NO_TOKEN)
    return out
