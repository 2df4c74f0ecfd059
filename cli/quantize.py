"""`deepmesh quantize`: a checkpoint in FP8, with INT4 experts, or in NVFP4."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from mesh.errors import ConfigError

if TYPE_CHECKING:
    from tools.quantize.output import UnitReport


class Format(StrEnum):
    fp8 = "fp8"
    w4a8 = "w4a8"
    nvfp4 = "nvfp4"


def quantize(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            help="A checkpoint of DeepSeek V3's family: bfloat16, FP8, or AWQ's, GPTQ's, compressed-tensors' INT4.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Where to write the quantized one; a run that was cut off goes on there.")],
    form: Annotated[
        Format,
        typer.Option(
            "--format",
            help="w4a8: routed experts in INT4, the rest in FP8. nvfp4: LAYERS in NVFP4, the rest in bfloat16.",
        ),
    ],
    calibration: Annotated[
        str | None,
        typer.Option(metavar="FILE|tasks", help="Texts that give activations static scales; JSON lines or plain text."),
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Texts to calibrate with, at most.")] = 128,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each of them, at most.")] = 512,
    awq: Annotated[bool, typer.Option("--awq", help="Search for scales of the experts' input channels.")] = False,
    layers: Annotated[
        str | None,
        typer.Option(
            metavar="SETS",
            help="For nvfp4, joined by commas: experts, feed-forward (dense layers, shared experts), output (the"
            " projection after attention); by default all three.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda; auto takes a GPU if there is one.")] = "auto",
) -> None:
    """Quantize a checkpoint layer by layer, in the layout in which such checkpoints are published."""
    # Imported here because it loads torch.
    from tools.quantize import forms, run
    from tools.quantize.calibration import read_calibration

    texts = None
    if calibration is not None:
        texts = read_calibration(calibration, model, sequences=sequences, tokens=tokens)
    options = run.Options(
        model, out, forms.Format(form.value), run.choose_device(device), calibration=texts, awq=awq,
        layers=None if layers is None else forms.parse_layers(layers),
    )  # fmt: skip
    try:
        reports = run.quantize(options)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}") from error
    Console().print(_table(reports))
    size_bytes = sum(report.size_bytes for report in reports)
    typer.echo(f"wrote {out} ({size_bytes / 1e6:,.0f} MB)")


def _table(reports: "list[UnitReport]") -> Table:
    columns = ("layer", "MB", "INT4 weights", "FP8 weights", "NVFP4 weights", "experts' outputs")
    table = Table(*columns, title="relative errors of what was quantized")
    for report in reports:
        errors = (report.int4_error, report.fp8_error, report.nvfp4_error, report.output_error)
        table.add_row(report.name, f"{report.size_bytes / 1e6:,.1f}", *map(_percent, errors))
    return table


def _percent(error: float | None) -> str:
    return "" if error is None else f"{error:.2%}"
