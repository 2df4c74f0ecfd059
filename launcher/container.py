"""Becomes a service of deploy/compose.yaml: `python -m launcher.container decode --config FILE`, with all that follows.

Compose does not calculate. Its files pass on what the user says, as variables; this program makes settings of them and
replaces itself by the service. Variables that are empty say nothing.

MODEL: a folder in /models, or the id of a model whose files are in the Hugging Face cache there.
GPUS: how many GPUs the mesh has; none computes on the CPU.  SPLIT: how workers divide them, as in 1P+1D.
DEVICES: which ones, as CUDA_VISIBLE_DEVICES takes them; by default the first.
DECODE_SET, PREFILL_SET: KEY=VALUE of that worker, separated by spaces. Quotes keep a value with spaces together.
"""

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from launcher.gpus import assign, name_gpus
from launcher.hub import find_model
from launcher.plan import MODULES
from launcher.split import IN_FLIGHT, Split, read_split, split_gpus
from launcher.workers import PARALLEL
from mesh.errors import CheckpointError, ConfigError, MeshError
from mesh.launch import EXIT_USELESS_TO_RETRY, Program, settings_of_environment
from mesh.processes.signals import end_on_signals
from mesh.processes.standard_streams import complain, settle

MODELS = Path("/models")


def program_of(role: str, variables: Mapping[str, str], models: Path = MODELS) -> Program:
    """The service of this role (gateway, decode, prefill) that these variables ask for. Downloads a model that only its
    id names and that the cache lacks.

    Raises ConfigError, and CheckpointError for a model that is not there.
    """
    said = {name: value for name, value in variables.items() if value}
    folder, name = _find(said.get("MODEL", "tiny-r1"), models)
    if role == "gateway":
        model = {"tokenizer_dir": str(folder), "name": name}
        return Program(MODULES[role], ["models=" + json.dumps([model])], {})
    environment, settings = _devices(role, said)
    settings += [f"engine.model_dir={json.dumps(str(folder))}", f"engine.model_name={json.dumps(name)}"]
    return Program(MODULES[role], [*settings, *_asked(f"{role.upper()}_SET", said)], environment)


def _find(model: str, models: Path) -> tuple[Path, str]:
    """The model's folder, and the name that clients know it by."""
    folder = models / model
    try:
        # In the Hub's cache a folder is named after a commit.
        found = folder if folder.exists() else find_model(model)
        if not found.exists():
            there = ", ".join(sorted(each.name for each in models.iterdir())) if models.exists() else ""
            raise CheckpointError(
                f"MODEL={model}: MODELS_DIR, which is {models} here, has no such folder"
                f" ({f'it has {there}' if there else 'it is empty'})"
            )
    except PermissionError as error:
        raise CheckpointError(f"MODEL={model}: user {os.getuid()} may not read {error.filename}") from error
    return found, Path(model).name


def _devices(role: str, said: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The variables and settings with which a worker takes its GPUs."""
    if "GPUS" not in said:
        return {}, []
    gpus = _number(said["GPUS"])
    split = _split(gpus, said.get("SPLIT", IN_FLIGHT), role)
    names = name_gpus(gpus, said.get("DEVICES"))
    if len(set(names)) < gpus:
        raise ConfigError(f"GPUS={gpus}, and DEVICES={said['DEVICES']} names {len(set(names))}")
    # All of the mesh's GPUs stay visible, the worker's own first: cuda_ipc reads the memory of the others.
    ranks = {"decode": split.decode_ranks, **({"prefill": split.prefill_ranks} if split.prefill_workers else {})}
    gpu = assign(ranks, names)[role]
    # Said also where torch finds no GPU: it must not compute on the CPU then.
    return gpu.environment, ["engine.device=cuda", *([f"{PARALLEL}.ranks={gpu.ranks}"] if gpu.ranks > 1 else [])]


def _number(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"GPUS={text}: expected how many GPUs the mesh has, as in GPUS=8")
    return int(text)


def _split(gpus: int, text: str, role: str) -> Split:
    counts, _ = read_split(text, "SPLIT=")
    if max(counts.values()) > 1:
        raise ConfigError(
            f"SPLIT={text}: compose starts one worker of each role. Give each more GPUs, as in 1Px2+1Dx6, or start"
            " several with deepmesh up --split, or in Kubernetes"
        )
    if role == "prefill" and not counts["P"]:
        raise ConfigError(
            f"GPUS={gpus} and SPLIT={text} have no prefill worker: say SPLIT=1P+1D, or leave SPLIT out; with GPUS"
            " compose.gpu.yaml is needed too"
        )
    return split_gpus(gpus, text, ("GPUS=", "SPLIT="))


def _asked(variable: str, said: Mapping[str, str]) -> list[str]:
    try:
        settings = shlex.split(said.get(variable, ""))
    except ValueError as error:
        raise ConfigError(f"{variable}: a quote is not closed") from error
    for setting in settings:
        if "=" not in setting:
            raise ConfigError(f"{variable} has {setting!r}: expected KEY=VALUE, separated by spaces")
    return settings


def main(arguments: Sequence[str]) -> NoReturn:
    """Become the service. If it cannot be started, complain and exit."""
    settle()
    end_on_signals()
    role, *options = arguments
    try:
        secrets = settings_of_environment()
        program = program_of(role, os.environ)
    except MeshError as error:
        complain(f"{role}: {error.message}")
        sys.exit(EXIT_USELESS_TO_RETRY)
    Program(program.module, [*secrets, *program.settings], program.environment).replace_this(*options)


if __name__ == "__main__":
    main(sys.argv[1:])
