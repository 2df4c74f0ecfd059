"""Finds out whether a result can be written before hours are spent on it."""

from pathlib import Path
from tempfile import TemporaryFile

from mesh.errors import ConfigError


def make_writable(*paths: Path) -> None:
    """Make the folders of these files, and leave no new file there. Raises ConfigError if one cannot be written."""
    for path in paths:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=path.parent).close()
            if path.exists():
                path.open("ab").close()
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from error
