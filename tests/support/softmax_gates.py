"""Gates whose affinities are a softmax, as the CUDA kernel takes them: how many experts, and how they are chosen."""

import pytest

from kernels.moe_gate import Routing

SOFTMAX_GATES = [
    pytest.param(160, Routing(6, 8, 3, normalize=False, scaling=16.0, shared=0, softmax=True), id="V2"),
    pytest.param(
        160, Routing(6, 8, 1, normalize=True, scaling=1.0, shared=2, softmax=True), id="one group, normalized"
    ),
    pytest.param(64, Routing(6, 1, 1, normalize=False, scaling=1.0, shared=2, softmax=True), id="V2-Lite, no groups"),
]
