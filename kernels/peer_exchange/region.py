"""The memory through which ranks exchange tensors on GPUs: `cuda/peers.cuh`. Each rank has a region for each group."""

from pathlib import Path

from kernels.structures import structure

MOST_RANKS = 8
UNIT_BYTES = 16
CHANNELS, SLOT_CHANNELS = 128, 64
LINE_UNITS, WORD_UNITS, SLOT_UNITS = 256, 1024, 2048
LINE_TURNS, WORD_TURNS, LAG, SLOT_TURNS = 2, 4, 3, 8
FLAG_OFFSET, FLAG_STRIDE, LINE_OFFSET = 4096, 32, 65536
MOST_THREADS, SLOT_THREADS, SLOT_BLOCK = 512, 512, 544
# Units that a rank can send to another at once.
MOST_LINE_UNITS, MOST_WORD_UNITS = CHANNELS * LINE_UNITS, CHANNELS * WORD_UNITS
_FEWEST_THREADS = 128
# Bytes of a region for each rank. A unit of a line brings as many bytes of flags.
_LINES = LINE_TURNS * MOST_LINE_UNITS * 2 * UNIT_BYTES
_WORDS = WORD_TURNS * MOST_WORD_UNITS * UNIT_BYTES
_SLOTS = SLOT_TURNS * SLOT_CHANNELS * SLOT_UNITS * UNIT_BYTES

_SOURCE = Path(__file__).parent / "cuda" / "peers.cuh"
# What a rank has once, for all its groups, and a group's ranks as one of them sees them.
State, Members = structure(_SOURCE, "State"), structure(_SOURCE, "Members")


def region_bytes(ranks: int) -> int:
    """Bytes of a rank's region for a group of this many ranks; 0 for one rank, which exchanges nothing."""
    return LINE_OFFSET + ranks * (_LINES + _WORDS + _SLOTS) if ranks > 1 else 0


def word_bytes(ranks: int) -> slice:
    """The part of a region that holds words: all ones before the first kernel, as all else is zeros."""
    if ranks == 1:
        return slice(0, 0)
    start = LINE_OFFSET + ranks * _LINES
    return slice(start, start + ranks * _WORDS)


def template_ranks(ranks: int) -> int:
    """The number of ranks that the kernel for this group is compiled for."""
    return next(most for most in (2, 4, MOST_RANKS) if ranks <= most)


def unit_blocks(units: int) -> tuple[int, int, int]:
    """Blocks and threads of a kernel that sends this many units as words or lines, and units of a block."""
    turn_units = next(each for each in (_FEWEST_THREADS, 256, 512, WORD_UNITS) if units <= CHANNELS * each)
    return -(-units // turn_units), min(turn_units, MOST_THREADS), turn_units


def slot_blocks(units: int) -> tuple[int, int]:
    """Blocks of a kernel that sends this many units as slots, and units of a block's turn."""
    turn_units = min(max(-(-units // SLOT_CHANNELS), SLOT_THREADS), SLOT_UNITS)
    return min(max(-(-units // turn_units), 1), SLOT_CHANNELS), turn_units
