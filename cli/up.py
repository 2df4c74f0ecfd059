"""`deepmesh up`: a mesh in the foreground."""

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from secrets import token_hex
from typing import Annotated

import typer

from cli.aims import BALANCED, AimOption, ExactOption, check_aim
from cli.endpoints import API_KEY_VARIABLE, HostOption
from cli.settings.check import GatewayKeys, check_memory, check_settings, check_weights, gateway_config, gateway_keys
from launcher.composition import compose, device_list, idle_gpus
from launcher.gpus import find_gpus
from launcher.hub import find_model, served_name
from launcher.log_lines import NAME, LinePrinter
from launcher.memory import with_ranks
from launcher.plan import GRPC_PORT, HOST, HTTP_PORT, METRICS_PORT, SCHEDULER_PORT, MeshPlan, ServiceSpec
from launcher.preflight import RANDOM_WEIGHTS, check_metrics_ports, check_plan
from launcher.serving import until_served
from launcher.shipped_model import shipped_model
from launcher.split import IN_FLIGHT, split_gpus
from launcher.supervisor import Supervisor
from mesh.addresses import is_loopback, with_port
from mesh.errors import ConfigError, Unauthenticated
from mesh.ports import free_port
from mesh.processes.signals import until_signal
from mesh.rpc.channel import Channels

# With SERVICE.engine.backend=oracle, that service's workers serve without a checkpoint.
WITHOUT_MODEL = "engine.backend=oracle"


def up(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="DIR|ID",
            help="A checkpoint's directory, or an id of the Hugging Face Hub, from its cache or downloaded to it; by "
            "default the shipped tiny-r1.",
        ),
    ] = None,
    decode: Annotated[int, typer.Option(min=1, max=64, help="Decode workers.")] = 1,
    prefill: Annotated[
        int, typer.Option(min=0, max=64, help="Prefill workers; with none, decode workers compute prompts.")
    ] = 0,
    kvstore: Annotated[int, typer.Option(min=0, max=16, help="KV stores: caches beyond the workers.")] = 0,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="GPUs to divide among workers as --split says; where there are none, ranks."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option(
            metavar="mP+nD",
            help="Prefill and decode workers that --gpus are divided among, equally or as in 1Px1+1Dx3. By default 1D: "
            "one worker computes prompts and answers.",
        ),
    ] = None,
    gpus_per_worker: Annotated[
        int | None,
        typer.Option(min=1, max=64, help="Ranks of each worker, on GPUs one each; their layout depends on the role."),
    ] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Ranks that compute a request together.")] = None,
    dp: Annotated[int | None, typer.Option(min=1, help="Groups of ranks with requests of their own.")] = None,
    ep: Annotated[int | None, typer.Option(min=1, help="Parts of the routed experts; by default one a rank.")] = None,
    scheduler: Annotated[
        int, typer.Option(min=1, max=8, help="Schedulers: the mesh goes on while one of them does.")
    ] = 1,
    gateway: Annotated[
        int, typer.Option(min=1, max=8, help="Gateways; each listens 10 ports above the one before it.")
    ] = 1,
    http_port: Annotated[int, typer.Option(min=1, max=65535, help="OpenAI HTTP.")] = HTTP_PORT,
    grpc_port: Annotated[int, typer.Option(min=1, max=65535, help="The gateway's gRPC.")] = GRPC_PORT,
    scheduler_port: Annotated[int, typer.Option(min=1, max=65535, help="For deepmesh status.")] = SCHEDULER_PORT,
    metrics_port: Annotated[
        int,
        typer.Option(
            min=0,
            max=65000,
            help="The gateway's Prometheus metrics; the scheduler's are 1, stores' 10, prefill workers' 100 and decode "
            "workers' 200 after it. 0 takes free ports.",
        ),
    ] = METRICS_PORT,
    host: HostOption = HOST,
    aim: AimOption = BALANCED,
    exact: ExactOption = False,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Draw weights, for measurements: needs no safetensors.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SERVICE.KEY=VALUE", help="E.g. decode.engine.max_requests=8; repeatable."),
    ] = None,
) -> None:
    """Run a mesh in the foreground: a scheduler, KV stores, prefill and decode workers, a gateway. Ctrl-C stops it.

    GPUs go to the decode workers first, one per rank, then to the prefill workers; more ranks than GPUs share them, and
    their memory. --gpus 4 is one worker of four ranks; --gpus 4 --split 1P+1D is two workers of two ranks each: one
    computes prompts, the other answers. CUDA_VISIBLE_DEVICES names the GPUs to use; --set decode.engine.device=cpu
    leaves them to others.

    A process that dies is restarted after 0.5 s, and after a longer pause each time. The mesh stops if one cannot be
    kept running, except for prefill workers, stores, and a decode worker, scheduler or gateway while another serves.
    """
    asked = tuple(settings or ())
    check_aim(aim)
    of_workers = [
        *([f"engine.aim={aim}"] if aim != BALANCED else []),
        *(["engine.exact=true"] if exact else []),
        *([RANDOM_WEIGHTS] if random_weights else []),
    ]
    asked = (*(f"{role}.{setting}" for role in ("decode", "prefill") for setting in of_workers), *asked)
    found, ranks = find_gpus(), {"decode": gpus_per_worker, "prefill": gpus_per_worker}
    if gpus is not None:
        if (decode, prefill, gpus_per_worker) != (1, 0, None):
            raise ConfigError("--gpus divides all of them: give --split, not --decode, --prefill or --gpus-per-worker")
        found, division = _first(found, gpus), split_gpus(gpus, split or IN_FLIGHT)
        decode, prefill = division.decode_workers, division.prefill_workers
        ranks = {"decode": division.decode_ranks, "prefill": division.prefill_ranks}
    elif split is not None:
        raise ConfigError("--split says who gets which of --gpus: give their number, too")
    roles = ("decode", "prefill") if prefill else ("decode",)
    model_dir = None if model is None else find_model(model, weights=not random_weights)
    if model is None and not all(f"{role}.{WITHOUT_MODEL}" in asked for role in roles):
        model_dir = shipped_model()
    stores = tuple(free_port() for _ in range(kvstore))
    parallel = {service: {"ranks": count, "tp": tp, "dp": dp, "ep": ep} for service, count in ranks.items()}
    plan = MeshPlan(
        model_dir,
        decode,
        http_port,
        grpc_port,
        scheduler_port,
        asked,
        prefill,
        stores,
        found,
        host,
        metrics_port or None,
        {service: {k: v for k, v in sizes.items() if v is not None} for service, sizes in parallel.items()},
        tuple(free_port() for _ in range(scheduler - 1)),
        gateway,
        resume_secret=token_hex(32),
        kv_secret=token_hex(32),
        model_name=None if model is None else served_name(model),
    )
    if (gpus, gpus_per_worker, tp, dp, ep) == (None,) * 5:
        plan = with_ranks(plan)
    specs = compose(plan)
    configs = check_settings(specs)
    keys = gateway_keys(gateway_config(configs))
    check_plan(plan)
    check_weights(specs, configs)
    check_memory(specs, configs)
    check_metrics_ports(specs)
    asyncio.run(_run(plan, specs, keys))


def _first(found: tuple[str, ...], gpus: int) -> tuple[str, ...]:
    """The first `gpus` of the GPUs found; empty if none were found, so that ranks compute on the CPU.

    Raises ConfigError if there are some, but too few.
    """
    if 0 < len(found) < gpus:
        raise ConfigError(f"--gpus {gpus}: there are {len(found)} (with CUDA_VISIBLE_DEVICES= ranks are on the CPU)")
    return found[:gpus]


async def _run(plan: MeshPlan, specs: Sequence[ServiceSpec], keys: GatewayKeys) -> None:
    with LinePrinter(max(len(spec.name) for spec in specs)) as printer:
        await _run_mesh(plan, specs, keys, printer)


async def _run_mesh(plan: MeshPlan, specs: Sequence[ServiceSpec], keys: GatewayKeys, printer: LinePrinter) -> None:
    printer(NAME, f"starting {device_list(specs)}")
    if (idle := idle_gpus(plan, specs)) is not None:
        printer(NAME, idle)
    if plan.metrics_port is not None:
        ports = "  ".join(f"{spec.name} {spec.metrics_port}" for spec in specs)
        printer(NAME, f"metrics: http://{HOST}:PORT/metrics, the ports being {ports}")
        page = next(spec.metrics_port for spec in specs if spec.name == "gateway")
        printer(NAME, f"page: http://{HOST}:{page}")
    channels = Channels()
    supervisor = Supervisor(specs, printer, channels)
    serving = asyncio.create_task(_serve(supervisor, plan, printer, channels, keys))
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


async def _serve(
    supervisor: Supervisor, plan: MeshPlan, printer: LinePrinter, channels: Channels, keys: GatewayKeys
) -> None:
    await supervisor.start()
    api_key = os.environ.get(API_KEY_VARIABLE) or keys.written
    # A gateway whose API key we do not know works as well; we only cannot ask it for its workers.
    with suppress(Unauthenticated):
        await until_served(with_port(plan.gateway_host, plan.grpc_port), plan.decode_workers, channels, api_key=api_key)
    if not keys.wanted and not is_loopback(plan.host):
        printer(NAME, f"{plan.host} is open to others, who need no key: --set 'gateway.api_keys=[...]' asks for one")
    served = "  ".join(
        f"OpenAI http://{with_port(plan.host, http_port)}/v1  gRPC {with_port(plan.host, grpc_port)}"
        for http_port, grpc_port in plan.gateway_ports
    )
    printer(NAME, f"ready: {served}  Ctrl-C stops")
    await supervisor.until_failure()
