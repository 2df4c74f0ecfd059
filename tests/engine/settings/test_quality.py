"""What rules take the pages of quality to say is what they say."""

import re

import pytest

from engine.settings.quality import SHOWN, Shown
from tests.support.programs import ROOT


def _page(shown: Shown) -> str:
    return (ROOT / shown.page).read_text(encoding="utf-8")


def _marked(page: str, column: str) -> set[str]:
    """The rows in which the column differs by more than chance."""
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| ")
    ]
    place = rows[0].index(column)
    return {row[0] for row in rows[1:] if row[place].endswith("*")}


@pytest.mark.parametrize("shown", SHOWN.values(), ids=[" ".join(key) for key in SHOWN])
def test_a_format_is_shown_as_the_page_says(shown: Shown) -> None:
    page = _page(shown)
    (settings,) = re.findall(rf"^- {re.escape(shown.column)}: (.*)$", page, re.MULTILINE)
    assert ("engine.device=cpu" in settings) == (shown.device == "cpu")
    assert (_marked(page, shown.column) <= _marked(page, shown.base)) == shown.within_chance


def test_formats_shown_on_a_cpu_or_doubted_are_not_chosen() -> None:
    assert not Shown("x", "cpu", "y", within_chance=True).allows
    assert Shown("x", "cuda", "y", within_chance=True).allows
    assert not Shown("x", "cuda", "y", within_chance=False).allows
    assert not Shown("x", "cuda", "y", within_chance=True, doubt="other weights lost").allows
