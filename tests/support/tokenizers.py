"""A tokenizer of bytes for meshes without a checkpoint."""

import atexit
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from tests.support.fake_decode import VOCABULARY
from tools.byte_tokenizer import write_tokenizer


@cache
def tokenizer_directory(vocabulary_size: int = VOCABULARY, context_tokens: int = 4096) -> Path:
    """Made once for all tests that need such a one, and removed when their process ends.

    As it is by default, the fake decode workers' tokens are in it.
    """
    directory = Path(mkdtemp(prefix="deepmesh-tokenizer-"))
    atexit.register(rmtree, directory, ignore_errors=True)
    write_tokenizer(directory, vocabulary_size, context_tokens)
    return directory
