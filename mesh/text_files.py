"""Reads text files, which are in UTF-8 whatever the locale."""

import errno
from pathlib import Path


def read_text(path: Path) -> str:
    """The file's text, without a byte order mark. Raises OSError with a `strerror` that says why, also if the file is
    no text in UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, f"it is no text in UTF-8 (byte {error.start})", str(path)) from error
