"""Files in the user's cache: what was measured or compiled here, so that a later start need not do it again."""

import hashlib
import json
import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

SEAL_BYTES = hashlib.sha256().digest_size


def cache_folder() -> Path:
    """deepmesh in XDG_CACHE_HOME, by default ~/.cache. In containers it is a volume."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepmesh"


def package_version() -> str:
    try:
        return version("deepmesh")
    except PackageNotFoundError:
        # It runs from a checkout.
        return "none"


def read_cached(file: Path) -> dict[str, Any]:
    """The object that the file has; an empty one if there is no such file, or if it has something else."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_cached(file: Path, content: dict[str, Any]) -> None:
    """Others may read meanwhile: they see the old file or the new one. If writing fails, nothing is kept."""
    _write(file, json.dumps(content).encode())


def read_sealed(file: Path) -> bytes | None:
    """What `write_sealed` wrote; None if there is no such file, or if it is not as it was written."""
    try:
        seal, content = (found := file.read_bytes())[:SEAL_BYTES], found[SEAL_BYTES:]
    except OSError:
        return None
    return content if seal == hashlib.sha256(content).digest() else None


def write_sealed(file: Path, content: bytes) -> None:
    """As `write_cached`, with a digest by which a damaged file is noticed."""
    _write(file, hashlib.sha256(content).digest() + content)


def _write(file: Path, content: bytes) -> None:
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=file.parent, suffix=file.suffix, delete=False) as written:
            written.write(content)
        Path(written.name).replace(file)
