"""Launches of captured graphs."""

from collections.abc import Callable

import torch


def launcher(graph: torch.cuda.CUDAGraph) -> Callable[[], None]:
    """What launches a captured graph, and keeps it, on the current stream of the current device, which is the graph's.

    Torch's own way first writes a seed and an offset of random numbers to the device, with a kernel each: 30 us of the
    host for each layer of a step with prompts. Nothing that is captured draws any.
    """
    # Imported here: a machine without a GPU may lack CUDA's bindings.
    from cuda.bindings import driver

    captured, device = driver.CUgraphExec(graph.raw_cuda_graph_exec()), torch.cuda.current_device()

    def launch() -> None:
        (status,) = driver.cuGraphLaunch(captured, torch._C._cuda_getCurrentRawStream(device))
        if int(status):
            raise RuntimeError(f"CUDA answers {status.name} to the launch of {graph}")

    return launch
