"""The sources of our attention over prompts of bf16 on Hopper, by a head's widths. Importing this needs no CUDA."""

from pathlib import Path
from typing import NamedTuple

# A head's own channels of the keys, those that all heads share, and its values.
Widths = tuple[int, int, int]


class Source(NamedTuple):
    path: Path
    # Keys of a step.
    keys: int


CUDA = Path(__file__).parent / "cuda"
SOURCES: dict[Widths, Source] = {
    (128, 64, 128): Source(CUDA / "bf16_prefill.cu", 128),
    (128, 64, 192): Source(CUDA / "bf16_prefill_192.cu", 64),
    (192, 64, 256): Source(CUDA / "bf16_prefill_256.cu", 64),
}
# With a mask. A step has the keys of one of its blocks, or of half of one.
MASKED: dict[Widths, Source] = {
    (128, 64, 128): Source(CUDA / "masked_prefill.cu", 128),
    (192, 64, 256): Source(CUDA / "masked_prefill_256.cu", 64),
}
