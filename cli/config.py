"""`deepmesh config`: every key of a service's configuration."""

from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from cli.aims import BALANCED, AimOption, ExactOption, check_aim
from launcher.hub import find_model
from launcher.plan import MODULES
from mesh.config_keys import did_you_mean
from mesh.domain.workers import WorkerRole
from mesh.errors import ConfigError


class Service(StrEnum):
    scheduler = "scheduler"
    kvstore = "kvstore"
    prefill = "prefill"
    decode = "decode"
    gateway = "gateway"


def config(
    service: Annotated[
        str | None,
        typer.Argument(metavar="SERVICE", help=f"{', '.join(Service)}; by default all of them, one after the other."),
    ] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="All services, as docs/configuration.md.")] = False,
    resolved: Annotated[
        bool,
        typer.Option("--resolved", help="What a worker would choose for a model on GPUs, and why. Nothing is started."),
    ] = False,
    model: Annotated[
        str | None, typer.Option(metavar="DIR|ID", help="With --resolved: the model; config.json is enough.")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, max=8, help="With --resolved: GPUs of the worker.")] = 1,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="With --resolved: h200, h100, ...; by default this machine's.")
    ] = None,
    aim: AimOption = BALANCED,
    exact: ExactOption = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="With --resolved: as for the service.")
    ] = None,
) -> None:
    """Print every key of a service's configuration, with its type, default and meaning."""
    # Imported here because it loads every service's configuration.
    from cli.settings.page import configuration_page

    if markdown:
        typer.echo(configuration_page(), nl=False)
        return
    console = Console(highlight=False)
    if not resolved and (model or gpus > 1 or gpu or aim != BALANCED or exact or settings):
        raise ConfigError("a model, GPUs, an aim and --set are for --resolved: deepmesh config decode --resolved ...")
    if resolved:
        from cli.resolved import cards_of, engine_of, print_resolved

        if service not in (Service.decode, Service.prefill) or model is None:
            raise ConfigError("--resolved says what a worker chooses: deepmesh config decode --resolved --model DIR")
        check_aim(aim)
        role = WorkerRole(service)
        engine = engine_of(role, find_model(model, weights=False), gpus, aim, exact=exact, settings=settings or ())
        print_resolved(engine, role, cards_of(gpu, gpus, engine), console)
        return
    for each in Service if service is None else (_service(service),):
        _print(each, console)


def _service(name: str) -> Service:
    if name not in list(Service):
        raise ConfigError(f"no service {name}{did_you_mean(name, list(Service))}: there are {', '.join(Service)}")
    return Service(name)


def _print(service: Service, console: Console) -> None:
    from cli.settings.services import MODELS
    from mesh.config_keys import public_keys_of

    console.print(f"[bold]{service}[/bold]: python -m {MODULES[service]} --set KEY=VALUE", soft_wrap=True)
    for key in public_keys_of(MODELS[service]):
        default = key.default if key.default in ("", "required") else f"default {key.default}"
        kind = Text(", ".join(filter(None, (key.kind, default))), style="dim")
        console.print(Text.assemble("\n", (key.path, "bold"), "  ", kind), soft_wrap=True)
        if key.meaning:
            console.print(f"    {key.meaning}", markup=False, soft_wrap=not console.is_terminal)
