"""The mark of what runs on Hopper alone."""

import pytest

from kernels.hopper import is_hopper

on_hopper = pytest.mark.skipif(not is_hopper(), reason="needs a Hopper GPU")
