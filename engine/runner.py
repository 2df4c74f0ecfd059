"""The model as a backend: weights, KV pool, and the execution of one step's batch."""

import dataclasses
import logging
from pathlib import Path

import psutil
import torch

from engine.batch import Batch, Computed, Sample, with_known_tokens
from engine.checkpoint import load_weights
from engine.config import ResolvedEngineConfig
from engine.model.config import ModelConfig, read_model_config
from engine.model.inputs import build_context
from engine.model.model import Model, model_rotations
from engine.sampler import sample_rows
from engine.shards import Shards, open_shards, weights_fingerprint
from mesh.blocks import BLOCK_TOKENS
from mesh.errors import ConfigError
from transfer.ticket import KvNamespace

logger = logging.getLogger(__name__)

# On CPU the pool takes no more than this unless one whole context needs it, or `total_blocks` asks for it.
CPU_POOL_BYTES = 1 << 30


class ModelBackend:
    """engine.batch.Backend over a checkpoint.

    Raises CheckpointError where the checkpoint cannot be served, ConfigError where its KV pool does not fit.
    """

    asynchronous = False

    def __init__(self, resolved: ResolvedEngineConfig) -> None:
        config = resolved.config
        assert config.model_dir is not None
        if config.threads is not None:
            torch.set_num_threads(config.threads)
        self._device = torch.device(resolved.device)
        self._model = load_model(config.model_dir, getattr(torch, resolved.dtype), self._device)
        model_config = self._model.config
        longest = model_config.max_position_embeddings
        if config.context_tokens is not None:
            longest = min(longest, config.context_tokens)
        self.total_blocks = config.total_blocks or self._affordable_blocks(resolved, longest)
        # A request that the pool cannot hold alone would never end.
        self.context_tokens = min(longest, self.total_blocks * BLOCK_TOKENS)
        self.block_bytes = _block_bytes(model_config, resolved)
        shape = (model_config.kv_layers, self.total_blocks, BLOCK_TOKENS, model_config.latent_dim)
        self._kv_pool = torch.zeros(shape, dtype=getattr(torch, resolved.kv_dtype), device=self._device)
        # Of the batch launched last.
        self._samples: list[Sample | None] = []
        self._rotations = model_rotations(model_config, self.context_tokens, self._device)
        self.model = config.model_name or config.model_dir.resolve().name
        self.vocabulary_size = model_config.vocab_size
        self.eos_token_ids = model_config.eos_token_ids
        self.namespace = KvNamespace(
            weights_fingerprint=weights_fingerprint(config.model_dir),
            dtype=resolved.kv_dtype,
            layers=model_config.kv_layers,
            layout=f"latent {model_config.kv_lora_rank}, interleaved rope {model_config.qk_rope_head_dim}",
        )

    def launch(self, batch: Batch) -> Computed:
        """Computes the batch right away."""
        self._samples = self.execute(Batch(batch.step, with_known_tokens(batch.rows, self._samples)))
        return Computed(self._samples)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> list[Sample | None]:
        """Compute the batch's tokens, write their KV, draw a token for each row with sampling."""
        context = build_context(self._model.config, batch.rows, self._rotations, self._kv_pool)
        logits = self._model.forward(context)
        sampled = iter(sample_rows(logits, [row for row in batch.rows if row.sampling is not None]))
        return [None if row.sampling is None else next(sampled) for row in batch.rows]

    def _affordable_blocks(self, resolved: ResolvedEngineConfig, longest: int) -> int:
        model_config, config = self._model.config, resolved.config
        free = free_bytes(self._device)
        return affordable_blocks(
            budget_bytes=int(free * config.kv_memory_fraction),
            block_bytes=_block_bytes(model_config, resolved),
            context_blocks=-(-longest // BLOCK_TOKENS),
            max_requests=config.max_requests,
            cap_bytes=CPU_POOL_BYTES if self._device.type == "cpu" else None,
        )


def _block_bytes(model_config: ModelConfig, resolved: ResolvedEngineConfig) -> int:
    latent_bytes = model_config.latent_dim * getattr(torch, resolved.kv_dtype).itemsize
    return model_config.kv_layers * BLOCK_TOKENS * latent_bytes


def affordable_blocks(
    *, budget_bytes: int, block_bytes: int, context_blocks: int, max_requests: int, cap_bytes: int | None
) -> int:
    """Blocks of the KV pool: what the budget holds, but no more than all requests at full context can use.

    `cap_bytes`, where given, limits it further, though never below one full context. Raises ConfigError where not even
    two blocks fit.
    """
    wanted = context_blocks * max_requests
    if cap_bytes is not None:
        wanted = min(wanted, max(cap_bytes // block_bytes, context_blocks))
    blocks = min(max(wanted, 2), budget_bytes // block_bytes)
    if blocks < 2:
        raise ConfigError(
            f"the KV pool may take {budget_bytes} bytes and one block of 64 tokens takes {block_bytes}:"
            " free memory, or raise engine.kv_memory_fraction"
        )
    return blocks


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on the device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def load_model(model_dir: Path, dtype: torch.dtype, device: torch.device) -> Model:
    """Read a checkpoint into a new model of `dtype`."""
    config = read_model_config(model_dir)
    with open_shards(model_dir) as shards:
        model = Model(_without_absent_modules(config, shards), dtype=dtype, device=device)
        load_weights(shards, dict(model.parameters()))
    return model


def _without_absent_modules(config: ModelConfig, shards: Shards) -> ModelConfig:
    """Tools that drop the MTP modules' weights leave their number in config.json: believe the weights."""
    present = 0
    while any(name.startswith(f"model.layers.{config.num_hidden_layers + present}.") for name in shards.entries):
        present += 1
    if present >= config.num_nextn_predict_layers:
        return config
    logger.info("the checkpoint holds %d of %d MTP modules", present, config.num_nextn_predict_layers)
    return dataclasses.replace(config, num_nextn_predict_layers=present)
