"""Compares chains of kernels in a CUDA graph with the same kernels run one after another."""

from collections.abc import Callable

import torch

Step = Callable[[], object]
# Called with its input and a function that it calls after each kernel.
Chain = Callable[[torch.Tensor, Step], torch.Tensor]


def assert_replays_are_exact(chain: Chain, shape: tuple[int, ...], replays: int) -> None:
    """Assert that replays equal separate kernels. Inputs, bfloat16 of `shape`, change from replay to replay, so that
    data left over from the replay before would show.

    New tensors must not be poisoned here, since that would put a waiting kernel between any two of the chain.
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
