"""Runs work of a library that recurses as deep as its input says."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

# Address space: only what the recursion reaches takes memory, until the work has ended.
STACK_BYTES = 512 * 2**20

ResultT = TypeVar("ResultT")

# The size of new threads' stacks is one for the whole process. A thread that someone else starts in the same moment
# gets a large stack, too, which does no harm.
_sizing = threading.Lock()


def on_deep_stack(work: Callable[[], ResultT]) -> ResultT:
    """The result of `work`, or what it raised, from a thread of its own. The caller waits; other threads run."""
    with ThreadPoolExecutor(1, thread_name_prefix="deep-stack") as thread:
        with _sizing:
            usual = threading.stack_size(STACK_BYTES)
            try:
                result = thread.submit(work)
            finally:
                threading.stack_size(usual)
        return result.result()
