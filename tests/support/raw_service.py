"""A gRPC service of bytes for tests. It has one method of each kind; tests give the behaviours."""

from typing import Any

import grpc

from mesh.rpc.server import Registration

SERVICE = "test.RawService"


def raw_registration(endless: tuple[str, ...] = (), **behaviors: Any) -> Registration:
    """Behaviours by kind: `raw_registration(unary_unary=handler)` serves the method "/test.RawService/unary_unary"."""

    def add(servicer: None, server: grpc.aio.Server) -> None:
        handlers = {kind: getattr(grpc, f"{kind}_rpc_method_handler")(behavior) for kind, behavior in behaviors.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

    return Registration(add, None, SERVICE, endless)


def raw_method(channel: grpc.aio.Channel, kind: str) -> Any:
    return getattr(channel, kind)(f"/{SERVICE}/{kind}")
