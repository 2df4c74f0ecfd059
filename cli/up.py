"""`deepmesh up`: a mesh in the foreground."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from cli.launcher.composition import (
    GRPC_PORT,
    HOST,
    HTTP_PORT,
    SCHEDULER_PORT,
    MeshPlan,
    ServiceSpec,
    compose,
    device_list,
)
from cli.launcher.gpus import find_gpus
from cli.launcher.log_lines import LinePrinter
from cli.launcher.preflight import check_plan
from cli.launcher.serving import until_served
from cli.launcher.shipped_model import shipped_model
from cli.launcher.supervisor import NAME, Supervisor
from cli.settings.check import check_settings
from mesh.channel import Channels
from mesh.ports import free_port
from mesh.signals import until_signal

# With this setting, as SERVICE.engine.backend=oracle, a worker serves without a checkpoint.
WITHOUT_MODEL = "engine.backend=oracle"


def up(
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A checkpoint's directory; by default the shipped tiny-r1.")
    ] = None,
    decode: Annotated[int, typer.Option(min=1, max=64, help="Decode workers.")] = 1,
    prefill: Annotated[
        int, typer.Option(min=0, max=64, help="Prefill workers; with none, decode workers compute prompts.")
    ] = 0,
    kvstore: Annotated[int, typer.Option(min=0, max=16, help="KV stores: caches beyond the workers.")] = 0,
    http_port: Annotated[int, typer.Option(min=1, max=65535, help="OpenAI HTTP.")] = HTTP_PORT,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535, help="The gateway's gRPC.")] = GRPC_PORT,
    scheduler_port: Annotated[int, typer.Option(min=1, max=65535, help="For deepmesh status.")] = SCHEDULER_PORT,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SERVICE.KEY=VALUE", help="E.g. decode.engine.max_requests=8; repeatable."),
    ] = None,
) -> None:
    """Run a mesh in the foreground: a scheduler, KV stores, prefill and decode workers, a gateway. Ctrl-C stops it.

    GPUs go to the decode workers, one each, then to the prefill workers; more workers than GPUs share them, and their
    memory. CUDA_VISIBLE_DEVICES names those to use; --set decode.engine.device=cpu leaves them to others.

    A process that dies is started again after 0.5 s, then after ever longer. The mesh stops when one cannot be kept
    running; prefill workers, stores, and a decode worker while another serves may be given up.
    """
    asked = tuple(settings or ())
    roles = ("decode", "prefill") if prefill else ("decode",)
    if model is None and not all(f"{role}.{WITHOUT_MODEL}" in asked for role in roles):
        model = shipped_model()
    stores = tuple(free_port() for _ in range(kvstore))
    plan = MeshPlan(model, decode, http_port, grpc_port, scheduler_port, asked, prefill, stores, find_gpus())
    specs = compose(plan)
    check_settings(specs)
    check_plan(plan)
    asyncio.run(_run(plan, specs))


async def _run(plan: MeshPlan, specs: Sequence[ServiceSpec]) -> None:
    printer = LinePrinter(max(len(spec.name) for spec in specs))
    printer(NAME, f"starting {device_list(specs)}")
    channels = Channels()
    supervisor = Supervisor(specs, printer, channels)
    serving = asyncio.create_task(_serve(supervisor, plan, printer, channels))
    stopping = asyncio.create_task(until_signal())
    try:
        await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            serving.result()
        printer(NAME, "stopping")
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        await supervisor.stop()
        stopping.cancel()


async def _serve(supervisor: Supervisor, plan: MeshPlan, printer: LinePrinter, channels: Channels) -> None:
    await supervisor.start()
    await until_served(f"{HOST}:{plan.grpc_port}", plan.decode_workers, channels)
    printer(NAME, f"ready: OpenAI http://{HOST}:{plan.http_port}/v1  gRPC {HOST}:{plan.grpc_port}  Ctrl-C stops")
    await supervisor.until_failure()
