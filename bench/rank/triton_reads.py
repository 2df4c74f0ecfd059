"""Reads in Triton, of memory or of the second-level cache, for measurements of power."""

import triton
import triton.language as tl


@triton.jit
def read_in_turns(source, largest, rounds, SIZE: tl.constexpr):
    """Read parts of `source` (int32), SIZE numbers for each program: each program those of `rounds` programs, in turns.

    Reads pass the first-level cache. largest: [programs], of what the program read.
    """
    found = tl.zeros([SIZE], tl.int32)
    for number in range(rounds):
        part = (tl.program_id(0) + number * 7) % tl.num_programs(0)
        found = tl.maximum(found, tl.load(source + part * SIZE + tl.arange(0, SIZE), cache_modifier=".cg"))
    tl.store(largest + tl.program_id(0), tl.max(found, 0))
