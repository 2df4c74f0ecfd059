"""docs/sizing.md says what `deepmesh plan` says today."""

import re
from dataclasses import replace

import pytest

from capacity.plan import Asked, plan
from capacity.shapes import DEEPSEEK_R1
from cli.plan import GB
from engine.model.config import parse_model_config
from engine.model.quantization import Stored
from tests.support.programs import ROOT

FP8 = parse_model_config(DEEPSEEK_R1)
INT4 = replace(FP8, quantization=replace(FP8.quantization, experts=Stored.INT4))
PAGE = (ROOT / "docs/sizing.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (\d+, .*?) \| (.*) \|$", PAGE, re.MULTILINE)


def asked_for(layout: str) -> Asked:
    """What a row's first cell says: "8, FP8, 32,000 in" or "8, INT4 experts, FP8 KV, at most 50 ms"."""
    prompt = re.search(r"([\d,]+) in", layout)
    limit = re.search(r"at most (\d+) ms", layout)
    offloaded = re.search(r"(\d+) layers in host memory", layout)
    return Asked(
        "h200",
        int(layout.split(",")[0]),
        int(prompt[1].replace(",", "")) if prompt else 3500,
        1000,
        float(limit[1]) if limit else None,
        1 if "FP8 KV" in layout else 2,
        int(offloaded[1]) if offloaded else 0,
    )


def test_the_page_has_rows() -> None:
    assert len(ROWS) == 10


@pytest.mark.parametrize(("layout", "figures"), ROWS)
def test_a_row_is_what_the_command_says(layout: str, figures: str) -> None:
    found = plan(INT4 if "INT4" in layout else FP8, asked_for(layout))
    shown = [f"{found.weights_bytes / GB:.1f}"]
    if found.fits:
        rates = (found.decode_per_minute, found.prefill_per_minute, found.both_per_minute)
        shown += [
            f"{found.kv_tokens:,}",
            f"{found.requests}",
            f"{found.tpot_ms:.1f}",
            *(f"{rate:,.0f}" for rate in rates),
        ]
    else:
        shown += ["does not fit", "", "", "", "", ""]
    assert [cell.strip() for cell in figures.split("|")] == shown
