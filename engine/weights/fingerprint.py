"""A digest over every byte of a checkpoint's weights; that of a large checkpoint is kept in its folder."""

import fcntl
import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from engine.model.json_reader import read_json
from engine.weights.headers import Entry
from engine.weights.shards import open_shards
from mesh.errors import CheckpointError

# A smaller checkpoint is read again in a second or two, which is not worth a file in a folder that is not ours.
CACHED_BYTES = 1 << 30
CACHE = ".deepmesh-fingerprint.json"
DIGEST_BYTES = 16
_THREADS = 8
_CHUNK_BYTES = 8 << 20

_log = logging.getLogger(__name__)


def weights_fingerprint(model_dir: Path) -> str:
    """A digest of what the model computes: its configuration, and each tensor's name, dtype, shape and bytes.

    Equal for equal checkpoints, wherever they lie and however sharded. The bytes of a large checkpoint are read once;
    then the digest in CACHE holds for as long as its files have the same sizes and times of change: whoever can write
    into the folder is believed, as they can exchange the weights too. Raises CheckpointError.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    digest.update(json.dumps(read_json(model_dir / "config.json"), sort_keys=True).encode())
    digest.update(_weights_digest(model_dir).encode())
    return digest.hexdigest()


def _weights_digest(model_dir: Path) -> str:
    with open_shards(model_dir) as shards:
        entries, size_bytes = shards.entries, shards.size_bytes
    if size_bytes < CACHED_BYTES:
        return _digest_of(entries)
    files = {str(path.name): _stamp(path) for path in {entry.path for entry in entries.values()}}
    # The ranks of a worker start together: the first reads the weights, and the others wait for it.
    with _locked(model_dir / CACHE) as cache:
        if cache is None:
            return _digest_of(entries)
        known = _parsed(os.pread(cache, os.fstat(cache).st_size, 0))
        if known.get("files") == files and isinstance(digest := known.get("digest"), str):
            return digest
        _log.info("reading all weights once, for their fingerprint", extra={"fields": {"gb": size_bytes // 10**9}})
        digest = _digest_of(entries)
        text = json.dumps({"digest": digest, "files": files}, indent=1).encode()
        os.ftruncate(cache, 0)
        os.pwrite(cache, text, 0)
        return digest


def _digest_of(entries: Mapping[str, Entry]) -> str:
    """Over all tensors by name. Each is digested on its own: in parallel, and whichever file it lies in."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        for tensor in threads.map(_digest_of_tensor, (entries[name] for name in sorted(entries))):
            digest.update(tensor)
    return digest.hexdigest()


def _digest_of_tensor(entry: Entry) -> bytes:
    digest = hashlib.blake2b(f"{entry.name} {entry.dtype} {entry.shape} ".encode(), digest_size=DIGEST_BYTES)
    left = entry.size_bytes
    with entry.path.open("rb", buffering=0) as file:
        file.seek(entry.offset)
        while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
    if left:
        raise CheckpointError(f"{entry.path} ended while {entry.name} was read: it changed on disk")
    return digest.digest()


def _stamp(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _parsed(text: bytes) -> Mapping[str, object]:
    """What the cache says; nothing if it is new, or was not written to its end."""
    try:
        values = json.loads(text)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


@contextmanager
def _locked(path: Path) -> Iterator[int | None]:
    """The file, made if need be, locked for this process; None where it cannot be written."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        why = error.strerror
        _log.warning("the weights are read again at every start", extra={"fields": {"cache": str(path), "why": why}})
        yield None
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield file
    finally:
        os.close(file)
