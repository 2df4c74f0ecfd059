"""The choice of the highest scores on Hopper, a cluster of CTAs a query: `cuda/choice.cu`.

A captured step has room for the longest contexts, and its queries may all see little: those are left to `short_rows`,
whose CTAs need not be together. If clusters take turns, no more CTAs of one choose than its query needs.
"""

from pathlib import Path

import torch

from kernels.hopper import MOST_CLUSTERS, is_hopper, processors
from kernels.nvrtc import load_kernel
from kernels.structures import structure
from kernels.top_tokens import short_rows

SOURCE = Path(__file__).parent / "cuda" / "choice.cu"
Arguments = structure(SOURCE, "Arguments")
# Scores of a CTA for which it has room in shared memory.
THREADS, HELD, MOST_CTAS = 1024, 16384, 8
# More CTAs than these take longer to meet than they save.
USUAL_CTAS = 4
# CTAs that a multiprocessor runs at once.
CTAS_AT_ONCE = 2
# More queries than these whose rows the usual CTAs do not hold have CTAs with room for LONG_HELD scores, which fill a
# multiprocessor. With fewer queries more CTAs are faster.
LONG_HELD, FEW_QUERIES = 47104, 8
# The most scores of a CTA.
MARKED = 65536
# From this many queries on they are a prompt's, which see about as much as there is room for.
OF_PROMPT = 512


def takes(scores: torch.Tensor) -> bool:
    """Whether this kernel chooses: any number of up to 524,288 scores, on Hopper."""
    return scores.shape[1] <= MOST_CTAS * MARKED and is_hopper(scores.device)


def top_tokens(scores: torch.Tensor, seen: torch.Tensor, count: int) -> torch.Tensor:
    (queries, width), device = scores.shape, scores.device
    out = torch.empty(queries, count, dtype=torch.int32, device=device)
    if queries:
        few = 0
        if queries < OF_PROMPT:
            few = short_rows.MOST
            short_rows.choose(scores, seen, out)
        name, ctas = _form(queries, width, processors(device))
        arguments = Arguments(
            scores=scores.data_ptr(), seen=seen.data_ptr(), out=out.data_ptr(), width=width, count=count, few=few,
            turns=queries * ctas > _at_once(name, device),
        )  # fmt: skip
        kernel = load_kernel(SOURCE, name, device.index or 0)
        # Not before scores are complete: clusters that wait take 2 to 13 us longer.
        kernel.launch((queries * ctas, 1, 1), THREADS, arguments, cluster=ctas)
    return out


def _at_once(name: str, device: torch.device) -> int:
    """CTAs of a kernel that the device runs at once."""
    return processors(device) * (1 if name == "choose_long" else CTAS_AT_ONCE)


def _form(queries: int, width: int, processors: int) -> tuple[str, int]:
    """The kernel, and CTAs of a query: as many as have room for most of its scores, and more if that leaves
    multiprocessors idle. The rest of the scores is read again.

    Of many queries fewer CTAs are faster, as measured, though they read half of the scores again. Of long rows those
    CTAs are taken that find room at once for all queries, if they hold the rows.
    """
    many = queries >= CTAS_AT_ONCE * processors
    if not many and USUAL_CTAS * HELD < width <= USUAL_CTAS * MARKED and queries > FEW_QUERIES:
        at_once = (ctas for ctas in (4, 3, 2) if queries <= MOST_CLUSTERS[ctas] and width <= ctas * LONG_HELD)
        return "choose_long", next(at_once, USUAL_CTAS)
    ctas, scores = 1, 3 * HELD if many else HELD * 9 // 8
    while ctas < MOST_CTAS and ctas * scores < width:
        ctas *= 2
    while ctas < USUAL_CTAS and 2 * ctas * queries <= processors:
        ctas *= 2
    return "choose", ctas
