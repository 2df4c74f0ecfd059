"""`deepmesh plan`: whether a model fits, how much KV is left, and what it will do."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from launcher.hub import find_model

if TYPE_CHECKING:
    from capacity.plan import Asked, Plan
    from engine.model.quantization import KeptWeights

GB = 1e9


def plan(
    model: Annotated[
        str,
        typer.Option(metavar="DIR|ID", help="A checkpoint's directory or an id of the Hub; config.json is enough."),
    ],
    gpu: Annotated[str, typer.Option(help="The kind of GPU; h200 is measured, others are by datasheet.")] = "h200",
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of one worker, which share the experts.")] = 8,
    isl: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 3500,
    osl: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 1000,
    tpot_ms: Annotated[float | None, typer.Option(min=0.1, help="No more requests than keep this.")] = None,
    kv: Annotated[str, typer.Option(help="bf16 or fp8.")] = "bf16",
    offload: Annotated[
        int, typer.Option(min=0, metavar="LAYERS", help="Layers whose experts lie in host memory, for prompts.")
    ] = 0,
    weights: Annotated[
        str | None, typer.Option(help="fp8 or w4a8: quantized while they are loaded, as engine.weights says.")
    ] = None,
    costs: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the cost file of one GPU, for simulate.")
    ] = None,
) -> None:
    """Say what one worker on these GPUs holds and how fast it is, by the cost model that placement uses.

    The worker's GPUs divide the experts; each GPU has attention, dense layers and KV of its own. Communication between
    GPUs is not counted.
    """
    from capacity.plan import Asked, forms_that_fit
    from capacity.plan import plan as make_plan
    from engine.model.config import read_model_config
    from mesh.cost_file import save_costs

    if kv not in ("bf16", "fp8"):
        raise typer.BadParameter("expected bf16 or fp8", param_hint="--kv")
    asked = Asked(gpu, gpus, isl, osl, tpot_ms, 1 if kv == "fp8" else 2, offload, _form(weights))
    config = read_model_config(find_model(model, weights=False))
    found = make_plan(config, asked)
    table = _table(asked, found, () if found.fits else forms_that_fit(config, asked))
    if config.quantization.packed:
        table.caption = "INT4 of another tool, counted as deepmesh quantize --format w4a8 makes of it for a GPU"
    Console(width=140).print(table)
    if costs is not None:
        save_costs(found.costs, costs)
    if not found.fits:
        raise typer.Exit(1)


def _form(weights: str | None) -> "KeptWeights":
    forms: dict[str | None, KeptWeights] = {None: "quantized", "fp8": "fp8", "w4a8": "w4a8"}
    if weights not in forms:
        raise typer.BadParameter("expected fp8 or w4a8", param_hint="--weights")
    return forms[weights]


def _table(asked: "Asked", found: "Plan", forms: Sequence[str]) -> Table:
    """forms: those to which the weights could be quantized, so that they fit."""
    title = f"{asked.gpus} x {asked.gpu}, {asked.prompt_tokens:,} tokens in and {asked.output_tokens:,} out"
    table = Table(title=title, title_justify="left", show_header=False)
    if not found.gpu.measured:
        table.add_row("card", f"not measured: {found.gpu.source}")
        table.add_row("", f"{found.gpu.memory_bytes / GB:.0f} GB; taken to keep up {found.gpu.ceilings}")
    weights = f"{found.weights_bytes / GB:.1f} GB a GPU, {found.experts_bytes / GB:.1f} of them experts"
    table.add_row("weights", weights)
    if asked.offloaded:
        host = f"{found.host_bytes / GB:.1f} GB a GPU, of {asked.offloaded} layers, copied in every step"
        table.add_row("experts in host memory", host)
    if not found.fits:
        table.add_row("fits", f"no: {_why_not(asked, found, forms)}")
        return table
    table.add_row("fits", f"yes: {found.free_bytes / GB:.1f} GB are left for KV on a GPU")
    table.add_row("KV", f"{found.kv_tokens:,} tokens a GPU, {found.kv_token_bytes:,} bytes each")
    table.add_row("requests at once", f"{found.requests} a GPU, bounded by {found.bound}")
    table.add_row("time per token", f"{found.tpot_ms:.1f} ms")
    if found.requests > found.measured_requests:
        table.add_row("", f"extrapolated: steps were measured with up to {found.measured_requests} requests")
    table.add_row("requests a minute, tokens alone", f"{found.decode_per_minute:,.0f}")
    table.add_row("requests a minute, prompts alone", f"{found.prefill_per_minute:,.0f}")
    table.add_row("requests a minute, both", f"{found.both_per_minute:,.0f}")
    return table


def _why_not(asked: "Asked", found: "Plan", forms: Sequence[str]) -> str:
    if found.free_bytes <= 0:
        return f"a GPU lacks {-found.free_bytes / GB:.1f} GB for weights and work: {_remedy(asked, found, forms)}"
    if asked.tpot_ms is not None and found.kv_tokens >= asked.prompt_tokens + asked.output_tokens:
        return f"not even one request keeps {asked.tpot_ms:g} ms a token"
    return f"{found.kv_tokens:,} tokens of KV on a GPU are less than one request: {_remedy(asked, found, forms)}"


def _remedy(asked: "Asked", found: "Plan", forms: Sequence[str]) -> str:
    remedies = ["take more GPUs", *(f"quantize it while it loads (--weights {form})" for form in forms[:1])]
    if found.offload_needed is not None and found.offload_needed > asked.offloaded:
        remedies.append(f"for prompts --offload {found.offload_needed}")
    return ", or ".join(remedies)
