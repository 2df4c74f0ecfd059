"""Endpoints that the commands use: the ports of `deepmesh up`, unless an option or the environment names others."""

from typing import Annotated

import typer

from cli.launcher.composition import GRPC_PORT, HOST, SCHEDULER_PORT

GATEWAY = f"{HOST}:{GRPC_PORT}"
SCHEDULER = f"{HOST}:{SCHEDULER_PORT}"

GatewayOption = Annotated[
    str, typer.Option("--endpoint", envvar="DEEPMESH_GATEWAY", metavar="HOST:PORT", help="A gateway's gRPC.")
]
SchedulerOption = Annotated[
    str, typer.Option("--scheduler", envvar="DEEPMESH_SCHEDULER", metavar="HOST:PORT", help="The scheduler.")
]
