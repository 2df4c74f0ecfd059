"""`deepmesh health`: whether a service takes requests, for probes."""

from typing import Annotated

import typer

from cli.endpoints import EndpointArgument
from mesh.probe import READINESS, probe

ANSWER_SECONDS = 3.0


def health(
    endpoint: EndpointArgument,
    service: Annotated[str, typer.Option(help="readiness, or liveness: what gRPC's health service answers for.")] = (
        READINESS
    ),
) -> None:
    """Exit with status 0 if the service at HOST:PORT is ready (or alive), otherwise with one line and status 1."""
    probe(endpoint, service, ANSWER_SECONDS)
