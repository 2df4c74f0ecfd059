"""Small checkpoints, backends over them, and rows to run on these backends."""

import json
import random
import shutil
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import engine.backend
from engine.batch import Batch, Row, Sample
from engine.config import EngineConfig
from engine.runner.backend import ModelBackend
from engine.settings.device import Hardware, resolve
from mesh.blocks import BLOCK_TOKENS
from mesh.domain.sampling import Sampling
from tools.make_checkpoint import make_checkpoint

GREEDY = Sampling()
# Token ids whose rows in the output head give logits that vary.
READABLE_TOKENS = range(7, 102)
# The stronger, the more guesses of a predictable checkpoint are right, and the sooner its text repeats itself.
EMBEDDING_STRENGTH = 14.0


def tiny_checkpoint(directory: Path, *, dtype: str = "float32", seed: int = 0, **overrides: Any) -> Path:
    files = _files(json.dumps([dtype, seed, overrides]))
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory


@lru_cache(maxsize=16)
def _files(arguments: str) -> dict[str, bytes]:
    """The files of a checkpoint that many tests make, each for itself because some edit theirs."""
    dtype, seed, overrides = json.loads(arguments)
    with TemporaryDirectory() as made:
        make_checkpoint(Path(made), "tiny", dtype=dtype, seed=seed, overrides=overrides)
        return {path.name: path.read_bytes() for path in Path(made).iterdir()}


def predictable_checkpoint(directory: Path) -> Path:
    """A tiny checkpoint whose MTP module guesses some tokens right and some wrong, also in constrained answers: the
    state of the module, as that of the model, is mostly the embedding of the last token.
    """

    def strengthen_embeddings(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("embed_tokens.weight"):
                tensor.mul_(EMBEDDING_STRENGTH)
            elif name.endswith("eh_proj.weight"):
                tensor[:, : len(tensor)] += EMBEDDING_STRENGTH * torch.eye(len(tensor))

    rewrite_as_one_file(tiny_checkpoint(directory, seed=3), strengthen_embeddings)
    return directory


def model_backend(directory: Path, **settings: Any) -> ModelBackend:
    settings = {"model_dir": directory, "device": "cpu", "total_blocks": 64, **settings}
    return ModelBackend(resolve(EngineConfig(**settings), Hardware(cuda_devices=0, free_memory_bytes=1 << 30)))


def random_prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(READABLE_TOKENS, k=length)


def prompt_row(token_ids: Sequence[int], start: int, stop: int, blocks: Sequence[int], *, last: bool = True) -> Row:
    """The chunk [start, stop) of a prompt, in the request's blocks. A token is drawn after the last chunk."""
    needed = -(-stop // BLOCK_TOKENS)
    return Row(token_ids[start:stop], start, blocks[:needed], GREEDY if last else None)


def execute(backend: ModelBackend, *rows: Row) -> list[Sample | None]:
    return engine.backend.execute(backend, Batch(step=0, rows=rows))


def generate(
    backend: ModelBackend, prompt: Sequence[int], count: int, blocks: Sequence[int], *, chunk: int = 1 << 20
) -> list[int]:
    """The greedy tokens of one request that runs alone, with its prompt computed in chunks."""
    tokens = list(prompt)
    samples: list[Sample | None] = []
    for start in range(0, len(prompt), chunk):
        stop = min(start + chunk, len(prompt))
        samples = execute(backend, prompt_row(tokens, start, stop, blocks, last=stop == len(prompt)))
    while True:
        (sample,) = samples
        assert sample is not None
        tokens.append(sample.token_ids[0])
        if len(tokens) == len(prompt) + count:
            return tokens[len(prompt) :]
        samples = execute(backend, prompt_row(tokens, len(tokens) - 1, len(tokens), blocks))


def read_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, as the safetensors package reads it."""
    return {
        name: tensor for path in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(path).items()
    }


def rewrite_as_one_file(directory: Path, change: Callable[[dict[str, torch.Tensor]], object] = lambda _: None) -> None:
    """Replace the shards and their index by a single file, after `change` edited its tensors."""
    tensors = read_tensors(directory)
    change(tensors)
    for path in directory.glob("model*"):
        path.unlink()
    save_file(tensors, directory / "model.safetensors")


def with_modules(source: Path, directory: Path, count: int) -> Path:
    """A copy of the checkpoint with `count` MTP modules, all equal to its own one."""
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((directory / "config.json").read_text())
    layers, tensors = config["num_hidden_layers"], read_tensors(source)
    prefix = f"model.layers.{layers}."
    for module in range(1, count):
        for name in [name for name in tensors if name.startswith(prefix)]:
            tensors[f"model.layers.{layers + module}.{name.removeprefix(prefix)}"] = tensors[name].clone()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": count}))
    return directory


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
