"""Triton kernels that start before the previous kernel on the stream has ended (programmatic dependent launch, Hopper).

Every kernel launched with `dependent_launch` calls these two, in this order:

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
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

HOPPER = 9


@cache
def dependent_launch(device: torch.device) -> Mapping[str, bool]:
    """Launch options of a kernel that has the parameter `DEPENDENT: tl.constexpr`."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < HOPPER:
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}


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
