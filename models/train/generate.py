"""Greedy generation with a KV cache of latents, for judging the model while it is trained."""

from collections.abc import Sequence

import torch

from models.train.model import TinyModel

# Most tokens of prompts that are computed at once.
PREFILL_TOKENS = 1 << 18
# Steps between two checks of whether every sequence has ended.
STEPS_BETWEEN_CHECKS = 16


@torch.no_grad()
def generate(model: TinyModel, prompts: Sequence[Sequence[int]], most_tokens: int, end: int) -> list[list[int]]:
    """Each prompt's continuation by at most `most_tokens` tokens, without the `end` token that closes it."""
    longest = max(map(len, prompts))
    per_pass = max(1, PREFILL_TOKENS // longest)
    device = model.cosine.device
    caches = [
        torch.zeros(len(prompts), longest + most_tokens, model.config.latent_dim, dtype=model.dtype, device=device)
        for _ in model.layers
    ]
    token = torch.cat(
        [_prefill(model, prompts, slice(at, at + per_pass), caches) for at in range(0, len(prompts), per_pass)]
    )
    positions = torch.tensor([len(prompt) for prompt in prompts], device=device)
    made = [token]
    ended = token == end
    for step in range(1, most_tokens):
        token = _decode(model, token, positions, caches)
        positions = positions + 1
        made.append(token)
        ended |= token == end
        if step % STEPS_BETWEEN_CHECKS == 0 and bool(ended.all()):
            break
    rows = torch.stack(made, dim=1).tolist()
    return [row[: row.index(end)] if end in row else row for row in rows]


def _prefill(
    model: TinyModel, prompts: Sequence[Sequence[int]], rows: slice, caches: list[torch.Tensor]
) -> torch.Tensor:
    """Fill the caches' rows and return each prompt's next token, int64 [rows]. Shorter prompts are padded at the
    end.
    """
    members = prompts[rows]
    longest = max(map(len, members))
    device = model.cosine.device
    tokens = torch.zeros(len(members), longest, dtype=torch.int64)
    for row, prompt in enumerate(members):
        tokens[row, : len(prompt)] = torch.tensor(prompt)
    boundaries = torch.arange(len(members) + 1, dtype=torch.int32, device=device) * longest
    positions = torch.arange(longest, device=device).repeat(len(members))
    latents: list[torch.Tensor] = []
    layout = model.layout(positions, boundaries, longest)
    hidden = model(tokens.flatten().to(device), layout, [], latents)
    for cache, latent in zip(caches, latents, strict=True):
        cache[rows, :longest] = latent.unflatten(0, (len(members), longest))
    last = torch.tensor([len(prompt) - 1 for prompt in members], device=device)
    final = hidden.unflatten(0, (len(members), longest))[torch.arange(len(members), device=device), last]
    return model.lm_head(final).argmax(-1)


def _decode(model: TinyModel, token: torch.Tensor, positions: torch.Tensor, caches: list[torch.Tensor]) -> torch.Tensor:
    """The next token of each sequence, int64 [sequences]."""
    x = model.embed_tokens(token).to(model.dtype)
    cosine, sine = model.cosine[positions], model.sine[positions]
    for layer, cache in zip(model.stack(), caches, strict=True):
        x = x + layer.self_attn.decode(layer.input_layernorm(x), cosine, sine, cache, positions)
        x = x + layer.feed_forward(x, [])
    return model.lm_head(model.norm(x)).argmax(-1)
