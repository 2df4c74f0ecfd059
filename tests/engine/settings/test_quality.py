"""What rules take docs/quality.md to say is what it says."""

import re

import pytest

from engine.settings.quality import SHOWN, Shown
from tests.support.programs import ROOT

PAGE = (ROOT / "docs/quality.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]


@pytest.mark.parametrize("shown", SHOWN.values(), ids=[" ".join(key) for key in SHOWN])
def test_a_format_is_shown_as_the_page_says(shown: Shown) -> None:
    cells = [row[ROWS[0].index(shown.column)] for row in ROWS[1:]]
    (settings,) = re.findall(rf"^- {re.escape(shown.column)}: (.*)$", PAGE, re.MULTILINE)
    assert ("engine.device=cpu" in settings) == (shown.device == "cpu")
    assert (not any(cell.endswith("*") for cell in cells)) == shown.within_chance


def test_a_format_shown_on_a_cpu_is_not_chosen() -> None:
    assert not any(shown.allows for shown in SHOWN.values() if shown.device == "cpu")
    assert Shown("x", "cuda", within_chance=True).allows and not Shown("x", "cuda", within_chance=False).allows
