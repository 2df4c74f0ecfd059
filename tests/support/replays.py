"""Chains of kernels in a CUDA graph, against the same kernels one after another."""

from collections.abc import Callable

import torch

Step = Callable[[], object]
# Called with its input and what is to happen after each kernel.
Chain = Callable[[torch.Tensor, Step], torch.Tensor]


def assert_replays_are_exact(chain: Chain, shape: tuple[int, ...], replays: int) -> None:
    """Inputs, bfloat16 of `shape`, change from replay to replay, so that what was left by the one before shows.

    New tensors are not to be poisoned here: that would put a kernel that waits between any two.
    """
    given = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    inputs = [torch.randn_like(given) for _ in range(4)]
    expected = [chain(each, torch.cuda.synchronize) for each in inputs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(given, lambda: None)
    for replay in range(replays):
        given.copy_(inputs[replay % 4])
        found.fill_(float("nan") if found.is_floating_point() else 0x7F)
        graph.replay()
        assert torch.equal(found, expected[replay % 4])
