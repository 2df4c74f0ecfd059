"""Sealed names of streams: a client shows one so that any gateway resumes its answer.

A token is AES-256-GCM under a key that gateways share, so no client can make, change or read one. It is bound to the
tenant, the model and its weights, the request and the seed of its random numbers, and it expires.
"""

import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error as Base64Error
from hashlib import sha256

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from mesh.domain.requests import TokenRequest
from mesh.errors import UnknownStream

NONCE_BYTES = 12
ID_BYTES = 16
# Derives the key for this purpose only, and versions the format of what is sealed.
PURPOSE = b"deepmesh stream 1"
# Far longer than any token that we make.
MAX_CHARACTERS = 4096


class StreamClaim(msgspec.Struct, frozen=True, array_like=True):
    """The contents of a token."""

    # Random; workers know the stream by it.
    stream_id: bytes
    tenant: str
    model: str
    # Digest of the model's KV namespace, which includes its weights.
    weights: bytes
    # Digest of the prompt and of everything that chooses tokens, except the seed.
    request: bytes
    seed: int
    # Seconds since the epoch.
    expires_at: int


class StreamSeal:
    def __init__(self, secret: str | None) -> None:
        """secret: the same for every gateway of the mesh. Without one, only this gateway can open what it sealed."""
        self._key = AESGCM(sha256(PURPOSE + (secret or secrets.token_hex(32)).encode()).digest())

    def seal(self, claim: StreamClaim) -> str:
        nonce = secrets.token_bytes(NONCE_BYTES)
        sealed = nonce + self._key.encrypt(nonce, msgspec.msgpack.encode(claim), PURPOSE)
        return urlsafe_b64encode(sealed).rstrip(b"=").decode()

    def open(self, token: str, tenant: str, now: float) -> StreamClaim:
        """Raises UnknownStream for a token that is forged, expired or another tenant's."""
        try:
            claim = self._opened(token)
        except (InvalidTag, Base64Error, ValueError, msgspec.DecodeError):
            claim = None
        # For another tenant's token the error is the same as for a forged one, so it reveals nothing.
        if claim is None or claim.tenant != tenant:
            raise UnknownStream("there is no such stream: send the token that came with it, and the same API key")
        if claim.expires_at <= now:
            raise UnknownStream("the stream's token has expired: send the request again")
        return claim

    def _opened(self, token: str) -> StreamClaim:
        if len(token) > MAX_CHARACTERS:
            raise ValueError("too long")
        sealed = urlsafe_b64decode(token.encode("ascii") + b"=" * (-len(token) % 4))
        plain = self._key.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], PURPOSE)
        return msgspec.msgpack.decode(plain, type=StreamClaim)


def request_digest(request: TokenRequest) -> bytes:
    """Digest of everything that chooses the request's tokens, except the seed: the token brings that."""
    sampling = msgspec.structs.replace(request.sampling, seed=0)
    token_ids, stop = list(request.token_ids), request.stop
    chosen: tuple[object, ...] = (token_ids, sampling, stop.max_tokens, list(stop.token_ids), stop.ignore_eos)
    chosen += (request.constraint,) if request.sparse is None else (request.constraint, request.sparse)
    return sha256(msgspec.msgpack.encode(chosen)).digest()[:ID_BYTES]
