"""A tokenizer of bytes for meshes without a checkpoint."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from tests.support.fake_decode import VOCABULARY
from tests.support.run_directory import run_directory
from tools.byte_tokenizer import write_tokenizer


@cache
def tokenizer_directory(vocabulary_size: int = VOCABULARY, context_tokens: int = 4096) -> Path:
    """A directory with a tokenizer, made once for all tests of this run that need the same.

    With the defaults its vocabulary has the fake decode workers' tokens.
    """
    directory = Path(mkdtemp(prefix="tokenizer-", dir=run_directory()))
    write_tokenizer(directory, vocabulary_size, context_tokens)
    return directory
