"""The commands of `deepmesh`, and how a failed one ends."""

import importlib.metadata
import inspect
import sys
from collections.abc import Callable
from typing import Annotated

import typer
from grpc import StatusCode

from cli.bench import bench
from cli.calibrate import calibrate
from cli.certs import certs
from cli.chat import chat
from cli.config import config
from cli.demo import demo
from cli.endpoints import API_KEY_VARIABLE
from cli.eval import evaluate
from cli.health import health
from cli.make_checkpoint import make_checkpoint
from cli.plan import plan
from cli.quantize import quantize
from cli.role import role
from cli.simulate import simulate
from cli.status import status
from cli.up import up
from cli.value_names import Command, Group
from mesh.errors import MeshError, Unauthenticated
from mesh.launch import EXIT_FAILED, EXIT_USELESS_TO_RETRY
from mesh.processes.standard_streams import complain

HELP = """A mesh of gRPC services that serves DeepSeek V3, R1 and the models of their architecture.

`deepmesh up` listens on 127.0.0.1: OpenAI HTTP on 8000, the gateway's gRPC on 8001, the scheduler on 8002. The other
commands look there, unless an option or DEEPMESH_GATEWAY, DEEPMESH_SCHEDULER (host:port) says otherwise. Gateways with
API keys get the one in DEEPMESH_API_KEY.
"""


def build() -> typer.Typer:
    app = typer.Typer(cls=Group, no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback(help=_joined(HELP))(_options)
    for command in (up, chat, status, role, health, config, bench, demo, quantize, certs, calibrate, plan, simulate):
        app.command(cls=Command, help=_help(command))(command)
    app.command("make-checkpoint", cls=Command, help=_help(make_checkpoint))(make_checkpoint)
    app.command("eval", cls=Command, help=_help(evaluate))(evaluate)
    return app


def _help(command: Callable[..., None]) -> str:
    """The command's docstring."""
    return _joined(inspect.getdoc(command) or "")


def _joined(text: str) -> str:
    """Each paragraph in one line: typer keeps line breaks in all paragraphs but the first."""
    return "\n\n".join(paragraph.replace("\n", " ") for paragraph in text.strip().split("\n\n"))


def run() -> None:
    """Run one command. A MeshError becomes one line on stderr, and status 2 if trying again cannot help, otherwise 1.

    Errors of the operating system, such as a file that may not be written, and text that is not UTF-8 are handled
    alike.
    """
    try:
        build()()
    except MeshError as error:
        how = f" (--api-key KEY, or {API_KEY_VARIABLE})" if isinstance(error, Unauthenticated) else ""
        complain(f"deepmesh: {error.message}{how}")
        final = error.code in (StatusCode.FAILED_PRECONDITION, StatusCode.INVALID_ARGUMENT)
        sys.exit(EXIT_USELESS_TO_RETRY if final else EXIT_FAILED)
    except UnicodeError as error:
        complain(f"deepmesh: text that is no UTF-8 cannot be sent: {error}")
        sys.exit(EXIT_USELESS_TO_RETRY)
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        complain(f"deepmesh: {where}{error.strerror or error}")
        sys.exit(EXIT_FAILED)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"deepmesh {importlib.metadata.version('deepmesh')}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of `deepmesh` itself."""
