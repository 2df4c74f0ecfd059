"""Refuses what browsers send for pages of other origins, which may send anywhere although they may not read answers."""

import ipaddress
from collections.abc import Collection, Mapping

import msgspec
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.openai.answer_bodies import ErrorBody, ErrorDetail
from mesh.addresses import LOCALHOST, host_of

# These change nothing, and only CORS lets another page read what they answer.
SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
ANY = "*"


class ForeignPages:
    """ASGI middleware. `origins`: pages that may call, such as https://app.example, or * for all.

    only_addresses: for a server on loopback that asks for no keys. It is called by an address or as localhost, or by
    the name of one of `origins`. A page whose own name was made to lead to this machine (DNS rebinding) calls it by
    that name, and could read the answers.

    key: where an operator sets `origins`, for those that are refused; None if nowhere.
    """

    def __init__(self, app: ASGIApp, origins: Collection[str], only_addresses: bool, key: str | None = None) -> None:
        self._app = app
        self._origins = frozenset(origins)
        self._names = frozenset((LOCALHOST, *(host_of(_address(origin)) for origin in origins)))
        self._only_addresses = only_addresses and ANY not in self._origins
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope["method"], Headers(scope=scope)) if scope["type"] == "http" else None
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def _refusal(self, method: str, headers: Mapping[str, str]) -> Response | None:
        host = headers.get("host", "")
        if self._only_addresses and not self._leads_here(host_of(host)):
            otherwise = "" if self._key is None else f", set api_keys, or name the origin in {self._key}"
            message = (
                f"this server is for this machine alone, so it may not be called as {host[:100]}: call it by its"
                f" address{otherwise}"
            )
            return _refused(message, "host_not_allowed")
        origin = headers.get("origin", "")
        if method in SAFE_METHODS or _same_origin(headers, origin, host) or self._origins & {origin, ANY}:
            return None
        allowed = "" if self._key is None else f": {self._key} names those that may"
        message = f"pages of {origin[:100] or 'other origins'} may not call{allowed}"
        return _refused(message, "origin_not_allowed")

    def _leads_here(self, name: str) -> bool:
        if not name or name.lower() in self._names or name.lower().endswith(f".{LOCALHOST}"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _same_origin(headers: Mapping[str, str], origin: str, host: str) -> bool:
    """Whether a browser says so, or no browser sent the request. Older ones say only where it comes from."""
    site = headers.get("sec-fetch-site")
    if site is not None:
        return site in ("same-origin", "none")
    return not origin or _address(origin) == host.lower()


def _address(origin: str) -> str:
    return origin.partition("://")[2].lower()


def _refused(message: str, code: str) -> Response:
    body = ErrorBody(ErrorDetail(message, "invalid_request_error", code))
    return Response(msgspec.json.encode(body), 403, media_type="application/json")
