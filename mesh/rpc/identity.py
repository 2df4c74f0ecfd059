"""The caller's role and name, from its certificate, and checks of what a caller claims to be.

A certificate names one service by its URI, spiffe://deepmesh/ROLE/NAME. The name is a worker's, a gateway's or a
store's id, with every character except letters, digits, "-", "." and "_" written as %XX.
"""

from collections.abc import Collection, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Self
from urllib.parse import quote, unquote

from mesh.domain.workers import WorkerRole
from mesh.errors import PermissionDenied

# Separates, in an id, a service's name from the number of one of its processes.
PROCESS_SEPARATOR = "#"
TRUST_DOMAIN = "spiffe://deepmesh/"
# gRPC's name for the URIs of a certificate.
_ALTERNATIVE_NAME = "x509_subject_alternative_name"


class Role(Enum):
    """The role of a service of the mesh, as its certificate says."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    PREFILL = "prefill"
    DECODE = "decode"
    KVSTORE = "kvstore"
    # Starts and stops workers on the scheduler's advice.
    AUTOSCALER = "autoscaler"
    # A person with the command line, who may look but not act.
    OPERATOR = "operator"


_ROLES = frozenset(role.value for role in Role)


@dataclass(frozen=True, slots=True)
class Identity:
    role: Role
    name: str

    @property
    def uri(self) -> str:
        return f"{TRUST_DOMAIN}{self.role.value}/{quote(self.name, safe='')}"

    @classmethod
    def parse(cls, uri: str) -> Self | None:
        """None if the URI names no service of the mesh."""
        role, slash, name = uri.removeprefix(TRUST_DOMAIN).partition("/")
        if not uri.startswith(TRUST_DOMAIN) or not slash or role not in _ROLES or not name or "/" in name:
            return None
        return cls(Role(role), unquote(name))

    def __str__(self) -> str:
        return f"{self.role.value} {self.name!r}"


# The caller of the call being served; None on a server that does not ask for certificates.
caller: ContextVar[Identity | None] = ContextVar("caller", default=None)


def identity_of(auth_context: Mapping[str, Iterable[bytes]]) -> Identity:
    """The identity in a peer's verified certificate. Raises PermissionDenied unless it has exactly one."""
    names = [name.decode(errors="replace") for name in auth_context.get(_ALTERNATIVE_NAME, ())]
    found = [identity for name in names if (identity := Identity.parse(name)) is not None]
    if len(found) != 1:
        raise PermissionDenied(f"the certificate must name one service, as {TRUST_DOMAIN}ROLE/NAME, and not {names}")
    return found[0]


def check_role(method: str, roles: Collection[Role]) -> None:
    """Raises PermissionDenied if the caller is known and has none of these roles."""
    identity = caller.get()
    if identity is not None and identity.role not in roles:
        allowed = " and ".join(sorted(role.value for role in roles)) or "nobody"
        raise PermissionDenied(f"{identity} may not call {method}, which serves {allowed}")


def check_claim(what: str, name: str) -> None:
    """Raises PermissionDenied if the caller is known and its name is not `name`. `what`: the claimed field
    ("worker_id").
    """
    identity = caller.get()
    if identity is not None and identity.name != name:
        raise PermissionDenied(f"{identity} claims that {what} is {name!r}: it must be the name in its certificate")


def check_worker(worker_id: str, role: WorkerRole) -> None:
    """Raises PermissionDenied if the caller is known and is another worker, or has the other role."""
    check_claim("worker_id", worker_id)
    identity = caller.get()
    if identity is not None and identity.role.value != role.value:
        raise PermissionDenied(f"{identity} claims the role {role.value}: it must be the role in its certificate")


def check_host(worker_id: str, host: int, role: WorkerRole) -> None:
    """Raises PermissionDenied if the caller is known and is not a service on that host of the worker. It must be named
    like the worker, or like the worker with the host's number (decode-0-1), as the pods of a LeaderWorkerSet are.
    """
    identity = caller.get()
    own = f"{worker_id}-{host}"
    check_worker(own if identity is not None and identity.name == own else worker_id, role)
