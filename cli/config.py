"""`deepmesh config`: every key of a service's configuration."""

from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from launcher.plan import MODULES
from mesh.config_keys import did_you_mean
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
) -> None:
    """Print every key of a service's configuration, with its type, default and meaning."""
    # Imported here because it loads every service's configuration.
    from cli.settings.page import configuration_page

    if markdown:
        typer.echo(configuration_page(), nl=False)
        return
    console = Console(highlight=False)
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
