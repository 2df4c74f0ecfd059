"""Triton kernels that start before the previous kernel on the stream has ended (programmatic dependent launch, Hopper).

Every kernel launched by `launch`, or with `dependent_launch`, calls these two, in this order:

1. `start_next`, so that the next kernel's programs can take the room that this kernel's programs leave.
2. `wait_for_earlier`, before it loads anything that an earlier kernel wrote, and before it stores anything at all
   (memory is reused, so an earlier kernel may still read what was there). Every program calls it, even one that has
   nothing to do. If many programs have nothing to do and store nothing, it is enough that one of them calls it: the
   kernel has not ended before that program has.

Before it waits, a kernel may load weights, which no kernel of a step writes, and a step's plan: the first kernel after
the one that makes the plan is launched the plain way. A kernel with much to do may wait first and then call
`start_next`.

So a kernel that has ended has waited for the previous one, which has waited in turn. A kernel that waits for the
previous one, by `wait_for_earlier` or because it was launched the plain way, thus waits for all earlier ones. Events
between streams wait for whole kernels as usual. After other people's kernels, which do not keep this order, call
`let_all_end`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from threading import Lock
from typing import Any

import torch
import triton
import triton.language as tl
from triton import JITFunction
from triton.language.extra import cuda

HOPPER = 9


@cache
def dependent_launch(device: torch.device) -> Mapping[str, bool]:
    """Launch options of a kernel that has the parameter `DEPENDENT: tl.constexpr`."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < HOPPER:
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}


def launch(
    kernel: JITFunction, grid: tuple[int, ...], device: torch.device, *arguments: Any, num_warps: int = 4
) -> None:
    """Launch a kernel on the current stream of the current device, `device`.

    arguments: tensors, numbers and None for all parameters, constants too, but the last one, which is
    `DEPENDENT: tl.constexpr`. `kernel[grid](...)` finds what Triton compiled from what it would compile for; this finds
    it by the arguments' own values, in half the time: 2.7 us instead of 6.4. Triton still decides what is compiled.
    """
    options = dependent_launch(device)
    if not isinstance(kernel, JITFunction):
        # Without a GPU Triton interprets the kernel.
        kernel[grid](*arguments, num_warps=num_warps, **options)
        return
    # All that Triton's choice of code depends on, as far as tensors go: dtype and alignment.
    given = [(each.dtype, each.data_ptr() % 16 == 0) if isinstance(each, torch.Tensor) else each for each in arguments]
    compiled = compiled_kernel(kernel, device, num_warps, tuple(given))
    compiled[(*grid, 1, 1)[:3]](*arguments, options["DEPENDENT"])


# Large enough for the launches of some hundred sizes of steps, whose numbers are among the arguments.
@lru_cache(maxsize=4096)
def compiled_kernel(kernel: JITFunction, device: torch.device, num_warps: int, given: tuple[Any, ...]) -> Any:
    """given: the arguments but DEPENDENT; for a tensor its dtype, and whether it lies at a multiple of 16 bytes."""
    standing = [_Pointer(*each) if isinstance(each, tuple) else each for each in given]
    with _compiling(kernel):
        return kernel.warmup(*standing, grid=(1,), num_warps=num_warps, **dependent_launch(device))


@cache
def _compiling(kernel: JITFunction) -> Lock:
    """Held while a kernel is compiled: other threads that need it wait, and find it."""
    return Lock()


@dataclass(frozen=True, slots=True)
class _Pointer:
    """Stands for a tensor where Triton finds out what to compile for."""

    dtype: torch.dtype
    aligned: bool

    def data_ptr(self) -> int:
        return 0 if self.aligned else 1


def let_all_end() -> None:
    """Launch the plain way a kernel that does nothing: once it has ended, so have all earlier ones on the stream."""
    _do_nothing[(1,)](num_warps=1)


@triton.jit
def _do_nothing():
    pass


@triton.jit
def start_next(DEPENDENT: tl.constexpr):
    """Once every program has called this, the next kernel's programs may start, as far as there is room."""
    if DEPENDENT:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_earlier(DEPENDENT: tl.constexpr):
    """Wait until the previous kernel has ended and what it wrote can be read."""
    if DEPENDENT:
        cuda.gdc_wait()
