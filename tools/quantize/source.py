"""The checkpoint that is quantized, checked against its own configuration before anything is written."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from engine.model.config import ModelConfig, read_model_config
from engine.model.json_reader import read_json
from engine.model.parameters import NamedParameters, Part
from engine.model.quantization import Quantization, Stored
from engine.weights.checkpoint import load_weights, read_matrices, read_stored, some_of
from engine.weights.fingerprint import weights_fingerprint
from engine.weights.loading import undescribed_modules
from engine.weights.reader import Reader
from engine.weights.shards import Shards
from engine.weights.stored import SCALE_SUFFIX, companions, is_packed, is_unused, matrix_shape, packed_parts, scale_of
from mesh.domain.architectures import language_model_config
from mesh.errors import CheckpointError
from tools.checkpoint_tensors import TensorSpec, checkpoint_tensors


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that are quantized and written together."""

    # A layer's number, or "rest" for the embedding, the last norm and the head.
    name: str
    specs: tuple[TensorSpec, ...]

    @property
    def layer(self) -> int | None:
        """The layer's number; None if the unit is no layer."""
        return int(self.name) if self.name.isdigit() else None


class Source:
    """The checkpoint to be quantized. Raises CheckpointError if its weights have four bits already, or if tensors are
    missing, unknown, or of another shape than config.json says.
    """

    def __init__(self, directory: Path, shards: Shards, device: torch.device) -> None:
        """device: the one on which weights are dequantized and rounded."""
        self.directory = directory
        # The language model's config.json.
        self.settings: Mapping[str, Any] = MappingProxyType(
            dict(language_model_config(read_json(directory / "config.json")))
        )
        self.config: ModelConfig = read_model_config(directory)
        self.fingerprint = weights_fingerprint(directory)
        self.device = device
        self._shards = shards
        self._reader = Reader(shards, device)
        self.units = tuple(_units(self.config, shards))
        self._check()

    @property
    def stored(self) -> Quantization:
        return self.config.quantization

    def form(self, spec: TensorSpec) -> Stored:
        """How one of its tensors is stored."""
        if is_packed(self._shards.entries[spec.name]):
            return Stored.PACKED
        if not spec.quantizable or self.stored.packed:
            return Stored.PLAIN
        return self.stored.linear

    def matrix(self, name: str) -> torch.Tensor:
        """A weight as float32 on the device, dequantized."""
        return next(self.matrices([name]))

    def matrices(self, names: Sequence[str]) -> Iterator[torch.Tensor]:
        """Each of these weights in turn, as `matrix`. The next ones are read meanwhile."""
        return read_matrices(self._reader, names)

    def fill(self, parameters: NamedParameters) -> None:
        """Load these parameters of the model, each in its own dtype."""
        load_weights(self._reader, [Part(list(parameters))], unused=("model.", "lm_head."), quiet=True)

    def published(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """A tensor as it is stored, with its scales if it has any."""
        yield name, read_stored(self._shards, name)
        if name + SCALE_SUFFIX in self._shards.entries:
            yield name + SCALE_SUFFIX, read_stored(self._shards, name + SCALE_SUFFIX)

    def _check(self) -> None:
        already = {Stored.INT4: "has INT4 experts", Stored.NVFP4: "is in NVFP4"}.get(self.stored.experts)
        if already is not None and not self.stored.compressed:
            raise CheckpointError(f"{self.directory} {already} already: quantize the model that it was made of")
        specs = {spec.name: spec for unit in self.units for spec in unit.specs}
        entries = self._shards.entries
        missing = [name for name in specs if name not in entries]
        if missing:
            raise CheckpointError(f"{self.directory} lacks {some_of(missing)}")
        skipped = undescribed_modules(self.config, self._shards)
        left_out = {name for name in entries if name.startswith(skipped) or is_unused(name)}
        read = {companion for name in specs for companion in companions(self._shards, entries[name])} | specs.keys()
        unknown = [name for name in entries if name not in read and name not in left_out]
        if unknown:
            problem = f"{self.directory} holds tensors that its config.json does not describe"
            raise CheckpointError(f"{problem}: {some_of(unknown)}")
        for name, spec in specs.items():
            if matrix_shape(entries[name]) != spec.shape:
                raise CheckpointError(
                    f"{name} in {entries[name].path} has shape {list(entries[name].shape)};"
                    f" config.json makes it {list(spec.shape)}"
                )
            if spec.quantizable and self.stored.linear is Stored.FP8:
                scale_of(self._shards, entries[name])
            if is_packed(entries[name]):
                packed_parts(self._shards, entries[name])


def _units(config: ModelConfig, shards: Shards) -> Iterator[Unit]:
    """Units in the order of computation, without MTP modules that the checkpoint lacks."""
    specs: dict[str, list[TensorSpec]] = {"rest": []}
    for spec in checkpoint_tensors(asdict(config) | {"eos_token_id": 0}, range(0), config.indexer):
        parts = spec.name.split(".")
        specs.setdefault(parts[2] if parts[1] == "layers" else "rest", []).append(spec)
    for layer in config.unused_layers:
        if not any(name.startswith(f"model.layers.{layer}.") for name in shards.entries):
            del specs[str(layer)]
    for name, members in specs.items():
        yield Unit(name, tuple(members))
