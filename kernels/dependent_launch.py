"""Triton kernels that start while the one before them on the stream ends (programmatic dependent launch, Hopper).

Every kernel launched with `dependent_launch` calls, in this order:

1. `start_next`, so that the next kernel's programs take the room that this one's leave;
2. `wait_for_earlier`, before it loads what an earlier kernel wrote, before it stores anything at all (memory is used
   again: an earlier kernel may still read what lay there), and in every program, also one that has nothing to do (where
   many have nothing and store nothing, in one of them at least: the kernel has not ended before that one has).

Before it waits it may load weights, which no kernel of a step writes, and a step's plan: the first kernel behind the
one that makes the plan is launched in the plain way. What has much to do may wait first, and let the next start then.

Then a kernel that has ended has waited for the one before it, which has waited in turn: whoever waits for the kernel
before, by `wait_for_earlier` or because it was launched in the plain way, waits for all. Events between streams wait
for whole kernels as ever. Behind kernels of others that keep no such order, `let_all_end`.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

HOPPER = 9


def dependent_launch(device: torch.device) -> dict[str, bool]:
    """Options of a launch of a kernel that has the parameter `DEPENDENT: tl.constexpr`."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < HOPPER:
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}


def let_all_end() -> None:
    """Launch, in the plain way, a kernel that does nothing: when it has ended, all before it on the stream have."""
    _do_nothing[(1,)](num_warps=1)


@triton.jit
def _do_nothing():
    pass


@triton.jit
def start_next(DEPENDENT: tl.constexpr):
    """Once every program of this kernel has come here, the next kernel's may start, as far as there is room."""
    if DEPENDENT:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_earlier(DEPENDENT: tl.constexpr):
    """Until the kernel before has ended, and what it wrote can be read."""
    if DEPENDENT:
        cuda.gdc_wait()
