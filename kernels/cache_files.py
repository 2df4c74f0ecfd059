"""Files in the user's cache: what was measured on this machine, so that a later start need not measure it again."""

import json
import os
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any


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
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile("w", encoding="utf-8", dir=file.parent, suffix=".json", delete=False) as written:
            json.dump(content, written)
        Path(written.name).replace(file)
