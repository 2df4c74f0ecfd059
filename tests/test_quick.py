"""`make quick` keeps to what it promises, whatever tests come."""

import pytest

from tests.support.quick import TESTS, is_quick


@pytest.mark.parametrize(
    ("test", "quick"),
    [
        # Pure, and with gateways in this process.
        ("transfer/test_seal.py", True),
        ("gateway/openai/test_endpoint.py", True),
        # Torch; a process started by the test, and by what it imports.
        ("kernels/test_norm.py", False),
        ("scheduler/test_process.py", False),
        ("integration/test_faults.py", False),
    ],
)
def test_a_module_is_quick_without_torch_and_processes(test: str, quick: bool) -> None:
    path = TESTS / test
    assert path.is_file()
    assert is_quick(path) == quick
