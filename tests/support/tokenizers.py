"""A tokenizer of bytes for meshes without a checkpoint."""

import atexit
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import gettempdir, mkdtemp

from tests.support.fake_decode import VOCABULARY
from tools.byte_tokenizer import write_tokenizer

PREFIX = "deepmesh-tokenizer-"
# Directories older than this were left behind, because no run of tests takes so long.
LEFT_BEHIND_SECONDS = 24 * 3600


@cache
def tokenizer_directory(vocabulary_size: int = VOCABULARY, context_tokens: int = 4096) -> Path:
    """A directory with a tokenizer, made once for all tests that need the same, and removed when their process ends.

    With the defaults its vocabulary has the fake decode workers' tokens.
    """
    _remove_left_behind()
    directory = Path(mkdtemp(prefix=PREFIX))
    atexit.register(rmtree, directory, ignore_errors=True)
    write_tokenizer(directory, vocabulary_size, context_tokens)
    return directory


def _remove_left_behind() -> None:
    """Remove the directories of runs that were killed before they could do so."""
    for directory in Path(gettempdir()).glob(f"{PREFIX}*"):
        # Another run may remove it too.
        with suppress(FileNotFoundError):
            if time.time() - directory.stat().st_mtime > LEFT_BEHIND_SECONDS:
                rmtree(directory, ignore_errors=True)
