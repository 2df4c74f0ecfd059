"""The endpoints that commands use, and the credentials that they show there.

Endpoints are the ports of `deepmesh up`, unless an option or the environment names others.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

from launcher.plan import GRPC_PORT, HOST, SCHEDULER_PORT
from mesh.addresses import checked_address, checked_host
from mesh.config import TlsConfig
from mesh.rpc.channel import Channels, MutualTlsChannels
from mesh.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE

GATEWAY = f"{HOST}:{GRPC_PORT}"
SCHEDULER = f"{HOST}:{SCHEDULER_PORT}"


def _checked(address: str | None) -> str | None:
    try:
        return None if address is None else checked_address(address)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _checked_host(host: str) -> str:
    try:
        return checked_host(host)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def _endpoint(name: str, variable: str, what: str) -> Any:
    return typer.Option(name, envvar=variable, metavar="HOST:PORT", help=what, callback=_checked)


GatewayOption = Annotated[str, _endpoint("--endpoint", "DEEPMESH_GATEWAY", "A gateway's gRPC.")]
EndpointArgument = Annotated[
    str, typer.Argument(metavar="HOST:PORT", help="The gRPC of any service of the mesh.", callback=_checked)
]
# Where a mesh listens.
HostOption = Annotated[
    str,
    typer.Option(
        "--host",
        metavar="HOST",
        help="Address for clients, over HTTP and gRPC; 0.0.0.0 is every one of IPv4, :: of both kinds.",
        callback=_checked_host,
    ),
]
# For commands that can do without a gateway.
MaybeGatewayOption = Annotated[
    str | None,
    _endpoint("--endpoint", "DEEPMESH_GATEWAY", f"A deepmesh gateway's gRPC; by default {GATEWAY}."),
]
SchedulerOption = Annotated[str, _endpoint("--scheduler", "DEEPMESH_SCHEDULER", "The scheduler.")]
MeasuredSchedulerOption = Annotated[
    str | None,
    _endpoint(
        "--scheduler",
        "DEEPMESH_SCHEDULER",
        "Its scheduler, for what workers have measured of pushes and fetches, and of sparse prompts.",
    ),
]


# One variable for every command. OPENAI_API_KEY is not read: it may hold a secret of another company, and most meshes
# are called in plaintext.
API_KEY_VARIABLE = "DEEPMESH_API_KEY"
ApiKeyOption = Annotated[
    str | None, typer.Option("--api-key", envvar=API_KEY_VARIABLE, help="Where the endpoint asks for one.")
]


def _certificates(whose: str) -> Any:
    return typer.Option(
        "--certificates",
        envvar="DEEPMESH_CERTIFICATES",
        metavar="DIR",
        help=f"{whose}, where services want certificates: a folder of deepmesh certs.",
    )


OperatorsCertificates = Annotated[Path | None, _certificates("An operator's")]
# Operators may look and not act.
AutoscalersCertificates = Annotated[Path | None, _certificates("An autoscaler's")]


def certified_channels(directory: Path | None) -> Channels:
    """Channels with the certificate in this folder; plaintext if `directory` is None. Raises ConfigError."""
    if directory is None:
        return Channels()
    files = [directory / name for name in (CERTIFICATE_FILE, KEY_FILE, CA_FILE)]
    return MutualTlsChannels(TlsConfig(certificate=files[0], key=files[1], ca=files[2]))
