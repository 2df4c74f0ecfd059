"""Prints how long the parts of a long check take, which shows with pytest's `-s`."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def timed(what: str) -> Iterator[None]:
    start = time.monotonic()
    yield
    sys.stdout.write(f"{what}: {time.monotonic() - start:.0f} s\n")
    sys.stdout.flush()
