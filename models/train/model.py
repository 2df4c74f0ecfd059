"""The model as it is trained: DeepSeek V3 with one MTP module (technical report, sections 2.1 and 2.2)."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from engine.model.config import ModelConfig
from models.train.attention import LatentAttention
from models.train.batch import IGNORED
from models.train.device_batch import DeviceBatch
from models.train.experts import Experts, Gate
from models.train.indexer import INDEXERS
from models.train.layers import FeedForward, Layout, Linear, Norm
from models.train.lesson import Lesson
from models.train.rotation import rotation_table

# Tokens of a batch for each whose query's attention is computed for an indexer to learn from.
TOKENS_A_ROW = 16


@dataclass(frozen=True)
class Losses:
    """Mean losses over the learned tokens; the sum of the indexers' losses; and how often each expert was chosen,
    [expert layers, experts].
    """

    next_token: torch.Tensor
    second_token: torch.Tensor
    index: torch.Tensor
    load: torch.Tensor


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, *, dense: bool) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = LatentAttention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = FeedForward(config.hidden_size, config.intermediate_size) if dense else Experts(config)

    def forward(
        self, x: torch.Tensor, layout: Layout, loads: list[torch.Tensor], latents: list[torch.Tensor] | None = None
    ) -> torch.Tensor:
        """x: [tokens, hidden]; the experts' load is appended to `loads`."""
        x = x + self.self_attn(self.input_layernorm(x), layout, latents)
        return x + self.feed_forward(x, loads)

    def feed_forward(self, x: torch.Tensor, loads: list[torch.Tensor]) -> torch.Tensor:
        out = self.mlp(self.post_attention_layernorm(x))
        if isinstance(out, torch.Tensor):
            return out
        routed, load = out
        loads.append(load)
        return routed


class NextTokenModule(nn.Module):
    """Predicts the token after next from a token's hidden state and the next token; shares embedding and head."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.enorm = Norm(hidden, config.rms_norm_eps)
        self.hnorm = Norm(hidden, config.rms_norm_eps)
        self.eh_proj = Linear(2 * hidden, hidden)
        self.layer = Layer(config, dense=False)
        self.norm = Norm(hidden, config.rms_norm_eps)

    def forward(
        self, hidden: torch.Tensor, following: torch.Tensor, layout: Layout, loads: list[torch.Tensor]
    ) -> torch.Tensor:
        """hidden: the main model's output after its final norm; following: the next tokens' embeddings."""
        x = self.eh_proj(torch.cat((self.enorm(following), self.hnorm(hidden)), dim=-1))
        return self.norm(self.layer(x, layout, loads))


class TinyModel(nn.Module):
    """float32 parameters, activations in `dtype`."""

    cosine: torch.Tensor
    sine: torch.Tensor

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = config
        self.dtype = dtype
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.5)
        layers = [Layer(config, dense=config.is_dense(index)) for index in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, deviation=0.02)
        assert config.num_nextn_predict_layers == 1
        self.next_token = NextTokenModule(config)
        cosine, sine = rotation_table(config)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("sine", sine, persistent=False)

    def layout(
        self, positions: torch.Tensor, boundaries: torch.Tensor, longest: int, lesson: Lesson | None = None
    ) -> Layout:
        return Layout(boundaries, longest, self.cosine[positions], self.sine[positions], lesson)

    def stack(self) -> list[Layer]:
        """The layers of the main model."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def forward(
        self,
        tokens: torch.Tensor,
        layout: Layout,
        loads: list[torch.Tensor],
        latents: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """tokens: int64 [tokens]. Returns the final hidden states, normalized, [tokens, hidden]."""
        x = self.embed_tokens(tokens).to(self.dtype)
        for layer in self.layers:
            x = layer(x, layout, loads, latents)
        return self.norm(x)

    def second(
        self, hidden: torch.Tensor, tokens: torch.Tensor, layout: Layout, loads: list[torch.Tensor]
    ) -> torch.Tensor:
        """Hidden states that predict the token after next, from those of `forward`. A document's last row is
        garbage.
        """
        following = self.embed_tokens(tokens.roll(-1)).to(self.dtype)
        return self.next_token(hidden, following, layout, loads)

    def losses(self, batch: DeviceBatch) -> Losses:
        lesson = self.lesson(batch) if self.config.indexer else None
        layout = self.layout(batch.positions, batch.boundaries, batch.longest, lesson)
        loads: list[torch.Tensor] = []
        hidden = self(batch.tokens, layout, loads)
        second = self.second(hidden, batch.tokens, layout, loads)
        return Losses(
            _cross_entropy(self.lm_head(hidden), batch.targets),
            _cross_entropy(self.lm_head(second), batch.second_targets),
            lesson.loss() if lesson else hidden.new_zeros((), dtype=torch.float32),
            torch.stack(loads),
        )

    def lesson(self, batch: DeviceBatch) -> Lesson:
        """Rows that see more than indexers choose, drawn without repetition; learned tokens, which are few in long
        documents, as often as all others together.
        """
        assert self.config.indexer is not None
        learned, tokens = batch.targets != IGNORED, len(batch.tokens)
        weights = torch.where(learned, tokens / learned.sum().clamp(min=1), 1.0)
        weights = weights * (batch.positions >= self.config.indexer.top_k)
        # The smallest of exponential variates are such a draw (Efraimidis and Spirakis, 2006).
        times = torch.empty_like(weights).exponential_() / weights
        return Lesson(times.topk(max(1, tokens // TOKENS_A_ROW), largest=False).indices)

    def attentions(self) -> list[LatentAttention]:
        return [layer.self_attn for layer in (*self.stack(), self.next_token.layer)]

    def train_indexers(self, *, alone: bool) -> None:
        """From now on indexers learn: alone, with all else as it is and attention to all tokens, or with all else, and
        attention to what they choose.
        """
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not alone or INDEXERS in name)
        self.select(not alone)

    def select(self, selects: bool) -> None:
        """Whether queries attend to what indexers choose, from now on."""
        for attention in self.attentions():
            attention.selects = selects

    def gates(self) -> list[Gate]:
        """The gates in the order of Losses.load."""
        layers = [*self.stack(), self.next_token.layer]
        return [layer.mlp.gate for layer in layers if isinstance(layer.mlp, Experts)]

    def simulate_fp8(self) -> None:
        """From now on linear layers round as FP8 inference does, except those that stay bfloat16 in FP8 checkpoints."""
        for module in self.modules():
            if isinstance(module, (Linear, Experts)) and module not in (self.lm_head, self.next_token.eh_proj):
                module.fp8 = True


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.float(), targets, ignore_index=IGNORED)
