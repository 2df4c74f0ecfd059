"""`python -m bench.kernels` times every module that it names."""

from importlib import import_module

import pytest

from bench.kernels.__main__ import operations


@pytest.mark.parametrize("name", operations())
def test_an_operation_has_cases(name: str) -> None:
    assert callable(import_module(f"bench.kernels.{name}").cases)
