"""The checkpoint that is written. Each layer has a file, so that a run that was cut off can go on where it stopped."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open

from engine.weights.headers import INDEX, read_header
from mesh.errors import ConfigError
from tools.tensor_file import write_tensors

# Our key in the header of each file.
METADATA_KEY = "deepmesh.quantize"
# Files that are not copied from the source, because they hold or describe its own weights.
OF_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "config.json", INDEX, "hf_quant_config.json", "quant_cfg.json")


class UnitReport(msgspec.Struct, frozen=True):
    """The result for one unit's weights. Errors are relative, and None if no weight was rounded to that form."""

    name: str
    size_bytes: int
    int4_error: float | None = None
    fp8_error: float | None = None
    nvfp4_error: float | None = None
    # Error of the experts' outputs for the calibration texts; None without calibration.
    output_error: float | None = None


class _Metadata(msgspec.Struct, frozen=True):
    # Settings of the whole run. A file of a run with other settings does not belong to this checkpoint.
    settings: dict[str, str]
    report: UnitReport


@dataclass(frozen=True, slots=True)
class Output:
    directory: Path
    settings: dict[str, str]
    # The units' names, in order.
    names: Sequence[str]

    def prepare(self) -> None:
        """Raises ConfigError if the directory holds something else."""
        self.directory.mkdir(parents=True, exist_ok=True)
        ours = {self._file(name) for name in self.names}
        foreign = [path for path in self.directory.glob("*.safetensors") if path.name not in ours]
        if foreign:
            raise ConfigError(f"{self.directory} holds another checkpoint ({foreign[0].name}): name another directory")

    def finished(self, name: str) -> UnitReport | None:
        """The report of a unit that an earlier run has written. Raises ConfigError if that had other settings."""
        path = self.directory / self._file(name)
        if not path.exists():
            return None
        found = _read_metadata(path)
        if found is None or found.settings != self.settings:
            raise ConfigError(
                f"{path} was made of another model or with other settings: name another directory, or remove it"
            )
        return found.report

    def write(self, report: UnitReport, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write all of a unit and then rename the file, so that a file that exists is complete."""
        path = self.directory / self._file(report.name)
        partial = path.with_suffix(".partial")
        metadata = msgspec.json.encode(_Metadata(self.settings, report)).decode()
        write_tensors(partial, tensors, {"format": "pt", METADATA_KEY: metadata})
        partial.rename(path)

    def complete(self, source: Path, config: Mapping[str, Any], reports: Sequence[UnitReport]) -> None:
        """Write all files but the weights. config.json comes last: without it no loader takes this for a checkpoint."""
        for path in source.iterdir():
            if path.is_file() and not any(path.match(pattern) for pattern in OF_WEIGHTS):
                shutil.copyfile(path, self.directory / path.name)
        weight_map: dict[str, str] = {}
        total = 0
        for name in self.names:
            file = self._file(name)
            entries = read_header(self.directory / file)
            weight_map |= dict.fromkeys(entries, file)
            total += sum(entry.size_bytes for entry in entries.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        self._write_json(INDEX, index)
        self._write_json("quantization_report.json", msgspec.to_builtins(list(reports)))
        self._write_json("config.json", config)

    def _file(self, name: str) -> str:
        return f"model-{self.names.index(name) + 1:05d}-of-{len(self.names):05d}.safetensors"

    def _write_json(self, name: str, values: object) -> None:
        (self.directory / name).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_metadata(path: Path) -> _Metadata | None:
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(METADATA_KEY)
        return None if text is None else msgspec.json.decode(text, type=_Metadata)
    except (SafetensorError, msgspec.DecodeError):
        return None
