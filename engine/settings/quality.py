"""Number formats that change values, and where it was shown what they do to answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Shown:
    """A column of a page of quality.

    device: where it was computed. base: the column that differs from it by this format alone. within_chance: whether
    neither a task, nor all of them together, nor perplexity differs from the published weights in bfloat16 by more than
    chance, other than those in which the base does too. doubt: what an evaluation of other weights found against it.
    """

    column: str
    device: str
    base: str
    within_chance: bool
    doubt: str | None = None

    @property
    def page(self) -> str:
        return "docs/quality-gpu.md" if self.device == "cuda" else "docs/quality.md"

    @property
    def allows(self) -> bool:
        """Whether the format may be chosen on a GPU: its kernels themselves were shown to answer as well."""
        return self.device == "cuda" and self.within_chance and self.doubt is None

    def __str__(self) -> str:
        where = "on GPUs" if self.device == "cuda" else "on a CPU, not on GPUs,"
        found = f"answers {where} differ by {'no ' if self.within_chance else ''}more than chance"
        return f"{self.doubt or found} ({self.page})"


# By setting and value. A format without a column is never chosen. tests/engine/settings/test_quality.py compares them
# with the pages.
SHOWN: Mapping[tuple[str, str], Shown] = MappingProxyType(
    {
        ("kv_dtype", "float8_e4m3fn"): Shown(
            "FP8, FP8 KV",
            "cuda",
            "FP8",
            within_chance=True,
            doubt="with earlier weights 11 of 600 answers were lost and 3 won",
        ),
        ("prompt_attention_dtype", "float8_e4m3fn"): Shown("FP8, FP8 prompts", "cuda", "FP8", within_chance=True),
        ("weights", "fp8"): Shown("FP8", "cuda", "bf16", within_chance=False),
        ("weights", "w4a8"): Shown("W4A8 rounded", "cuda", "bf16", within_chance=False),
    }
)
