"""Who calls: the role and the name that a certificate gives, and what a caller may claim to be.

A certificate names one service by its URI, spiffe://deepmesh/ROLE/NAME. The name is a worker's id, a gateway's id or a
store's id, with what is no letter, digit, "-", "." or "_" written as %XX.
"""

from collections.abc import Collection, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Self
from urllib.parse import quote, unquote

from mesh.domain.workers import WorkerRole
from mesh.errors import PermissionDenied

# In the id of one of a service's processes, between the service's name and the process's number.
PROCESS_SEPARATOR = "#"
TRUST_DOMAIN = "spiffe://deepmesh/"
# What gRPC calls the URIs of a certificate.
_ALTERNATIVE_NAME = "x509_subject_alternative_name"


class Role(Enum):
    """What a service of the mesh is, as its certificate says."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    PREFILL = "prefill"
    DECODE = "decode"
    KVSTORE = "kvstore"
    # What starts and stops workers by the scheduler's word.
    AUTOSCALER = "autoscaler"
    # A person with the command line, who may look and not act.
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


# Who made the call that is being served; None on a server that does not ask for certificates.
caller: ContextVar[Identity | None] = ContextVar("caller", default=None)


def identity_of(auth_context: Mapping[str, Iterable[bytes]]) -> Identity:
    """The identity in a peer's verified certificate. Raises PermissionDenied if it has none, or more than one."""
    names = [name.decode(errors="replace") for name in auth_context.get(_ALTERNATIVE_NAME, ())]
    found = [identity for name in names if (identity := Identity.parse(name)) is not None]
    if len(found) != 1:
        raise PermissionDenied(f"the certificate must name one service, as {TRUST_DOMAIN}ROLE/NAME, and not {names}")
    return found[0]


def check_role(method: str, roles: Collection[Role]) -> None:
    """Raises PermissionDenied if the caller, where it is known, has none of these roles."""
    identity = caller.get()
    if identity is not None and identity.role not in roles:
        allowed = " and ".join(sorted(role.value for role in roles)) or "nobody"
        raise PermissionDenied(f"{identity} may not call {method}, which serves {allowed}")


def check_claim(what: str, name: str) -> None:
    """Raises PermissionDenied if the caller, where it is known, has another name than it claims ("worker_id")."""
    identity = caller.get()
    if identity is not None and identity.name != name:
        raise PermissionDenied(f"{identity} claims that {what} is {name!r}: it must be the name in its certificate")


def check_worker(worker_id: str, role: WorkerRole) -> None:
    """Raises PermissionDenied if the caller, where it is known, is another worker, or has the other role."""
    check_claim("worker_id", worker_id)
    identity = caller.get()
    if identity is not None and identity.role.value != role.value:
        raise PermissionDenied(f"{identity} claims the role {role.value}: it must be the role in its certificate")


def check_host(worker_id: str, host: int, role: WorkerRole) -> None:
    """Raises PermissionDenied if the caller, where it is known, is no service of that host of the worker: it is named
    as the worker, or as the worker with the host's number (decode-0-1), as the pods of a LeaderWorkerSet are.
    """
    identity = caller.get()
    own = f"{worker_id}-{host}"
    check_worker(own if identity is not None and identity.name == own else worker_id, role)
