"""`deepmesh certs`: a development CA, and certificates for the services of a mesh."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

import typer

from mesh.errors import ConfigError
from mesh.rpc.identity import Identity, Role

# The names that `deepmesh up` gives its services.
USUAL = ("gateway/gateway", "scheduler/scheduler", "prefill/prefill-0", "decode/decode-0", "kvstore/kvstore-0")
# Callers that are not services.
OTHERS = ("operator/operator", "autoscaler/autoscaler")
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


def certs(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where they are written; a CA that is there is used again.")],
    name: Annotated[
        list[str] | None,
        typer.Option(metavar="ROLE/NAME", help="Whom to certify; repeatable. By default one of each role."),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST", help="Under which clients call the gateway; by default this machine alone."),
    ] = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long they are valid.")] = 30,
) -> None:
    """Make certificates for development and tests. Each names a role and a service.

    NAME is the service's own id: worker_id, store_id or gateway_id. Each service gets the three files of its folder as
    security.tls.certificate, .key and .ca. Whoever has ca-key.pem can pretend to be any service: in production, use
    your own CA.
    """
    # Imported here because only this command needs it.
    from cli.authority import Authority

    identities = [_identity(each) for each in name or (*USUAL, *OTHERS)]
    authority = Authority.in_directory(out, days)
    for identity in identities:
        directory = out / identity.role.value / quote(identity.name, safe="")
        authority.issue(identity, directory, _hosts(identity, host))
        typer.echo(f"{identity.uri}  {directory}")


def _identity(text: str) -> Identity:
    role, slash, name = text.partition("/")
    roles = [each.value for each in Role]
    if not slash or not name or role not in roles:
        raise ConfigError(f"--name {text}: expected ROLE/NAME, the role being {', '.join(roles)}")
    return Identity(Role(role), name)


def _hosts(identity: Identity, hosts: Sequence[str] | None) -> Sequence[str]:
    """The hosts of a gateway's certificate. Only a gateway has clients that check its host."""
    return (hosts or LOCAL_HOSTS) if identity.role is Role.GATEWAY else ()
