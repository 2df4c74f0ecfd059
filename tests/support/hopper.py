"""The mark of tests that run on Hopper GPUs alone."""

import pytest

from kernels.hopper import is_hopper

on_hopper = pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")
