import threading

import pytest

from mesh.text.deep_stack import STACK_BYTES, on_deep_stack


def test_the_work_is_done_on_a_large_stack() -> None:
    # A thread that is started meanwhile has the size that is set then.
    before = threading.stack_size()
    assert on_deep_stack(lambda: threading.current_thread() is not threading.main_thread())
    assert STACK_BYTES > 2**28 and threading.stack_size() == before


def test_what_the_work_raises_reaches_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        on_deep_stack(lambda: 1 // 0)
