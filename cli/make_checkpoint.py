"""`deepmesh make-checkpoint`: a random model to run everything with."""

from pathlib import Path
from typing import Annotated

import typer
import yaml

from mesh.errors import ConfigError


def make_checkpoint(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write it.")],
    preset: Annotated[str, typer.Option(help="tiny (1M parameters) or small (30M).")] = "small",
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16, float32, float8, or w4a8 (float8 with INT4 experts).")
    ] = "bfloat16",
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds write equal weights.")] = 0,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A key of config.json, e.g. num_hidden_layers=8; repeatable."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a checkpoint that is there.")] = False,
) -> None:
    """Write a random checkpoint of the DeepSeek V3 architecture in Hugging Face format."""
    if (directory / "config.json").exists() and not overwrite:
        raise ConfigError(f"{directory} holds a checkpoint: name another directory, or add --overwrite")
    overrides = dict(_parsed(setting) for setting in settings or ())
    # Imported here because it loads torch.
    from tools import make_checkpoint as maker

    try:
        maker.make_checkpoint(directory, preset, dtype=dtype, seed=seed, overrides=overrides)
    except OSError as error:
        raise ConfigError(f"cannot write {directory}: {error.strerror or error}") from error
    size_bytes = sum(path.stat().st_size for path in directory.iterdir())
    typer.echo(f"wrote {directory} ({size_bytes / 1e6:,.0f} MB)")


def _parsed(setting: str) -> tuple[str, object]:
    key, separator, text = setting.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set {setting}: expected KEY=VALUE")
    try:
        return key, yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {setting}: {error}") from error
