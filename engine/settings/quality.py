"""Number formats that change values, and where it was shown what they do to answers."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class Shown:
    """A column of docs/quality.md. device: where it was computed. within_chance: whether neither a task, nor all of
    them together, nor perplexity differs from the published weights by more than chance.
    """

    column: str
    device: str
    within_chance: bool

    @property
    def allows(self) -> bool:
        """Whether the format may be chosen on a GPU: its kernels themselves were shown to answer as well."""
        return self.device == "cuda" and self.within_chance

    def __str__(self) -> str:
        return f"docs/quality.md has {self.column} computed on {'GPUs' if self.device == 'cuda' else 'a CPU'}"


# By setting and value. A format without a column is never chosen. tests/engine/settings/test_quality.py compares them
# with the page.
SHOWN: Mapping[tuple[str, str], Shown] = MappingProxyType(
    {
        ("kv_dtype", "float8_e4m3fn"): Shown("FP8, FP8 KV", "cpu", within_chance=True),
        ("weights", "fp8"): Shown("FP8", "cpu", within_chance=False),
        ("weights", "w4a8"): Shown("W4A8 rounded", "cpu", within_chance=False),
    }
)
