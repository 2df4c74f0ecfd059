"""The module that guesses tokens: one decoder layer after the model's (DeepSeek-V3, 2024, section 2.2)."""

import torch

from engine.model.allocator import Allocator
from engine.model.config import ModelConfig
from engine.model.context import ForwardContext
from engine.model.layers import DecoderLayer
from engine.model.parameters import NamedParameters, cut, whole
from engine.model.residual import Residual
from kernels.linear import linear
from kernels.norm import join_rms_norms

# Checkpoints hold copies of the model's own embedding and head.
SHARED_WITH_MODEL = ("embed_tokens.weight", "shared_head.head.weight")


class MtpModule:
    """Guesses the token after a token from that token's embedding and the hidden state of the token before it. The
    first module reads the model's hidden states, each other those of the module before it (DeepSeek-V3, 2024, section
    2.2).

    The KV of (hidden state i, token i + 1) lies at position i + 1, so that a block depends on its own tokens and those
    before it alone. The hidden state before the first token is zeros.
    """

    def __init__(self, config: ModelConfig, index: int, allocate: Allocator) -> None:
        """index: of its layer, in the KV pool and in the checkpoint."""
        hidden, self._share = config.hidden_size, allocate.group.share
        self._epsilon = config.rms_norm_eps
        self._embedding_norm = allocate(hidden)
        self._hidden_norm = allocate(hidden)
        # This rank's share of the inputs: with few rows the product takes as long as reading the weight.
        self._merge = allocate(hidden, self._share.size(2 * hidden))
        self.layer = DecoderLayer(config, index, allocate)
        self._norm = allocate(hidden)

    def parameters(self, prefix: str) -> NamedParameters:
        yield whole(f"{prefix}.enorm.weight", self._embedding_norm)
        yield whole(f"{prefix}.hnorm.weight", self._hidden_norm)
        yield from cut([whole(f"{prefix}.eh_proj.weight", self._merge)], 1, self._share)
        yield from self.layer.parameters(prefix)
        yield whole(f"{prefix}.shared_head.norm.weight", self._norm)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, residual: Residual, context: ForwardContext
    ) -> torch.Tensor:
        """embedded: the tokens; hidden: the states of the tokens before them, after a last norm. Both [tokens, hidden],
        and so is the result, which is after the module's own last norm.
        """
        columns = self._share.of(2 * embedded.shape[1])
        joined = join_rms_norms(embedded, hidden, self._embedding_norm, self._hidden_norm, self._epsilon)
        parts = linear(joined[:, columns].contiguous(), self._merge)
        delta = self.layer.forward(residual.delta(parts), residual, context)
        return residual.finish(delta, self._norm)
