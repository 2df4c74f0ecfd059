"""Attention in Triton fits the shared memory of cards that are not Hopper's."""

import os
import subprocess
import sys

import pytest

from kernels.mla_prefill.triton import choose_tiling, padded_widths
from tests.support.compiled_for_cards import CARDS, WIDTHS


@pytest.mark.parametrize("shared_bytes", sorted(set(CARDS.values())))
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("item_bytes", [2, 4])
def test_a_tiling_fits_the_card(shared_bytes: int, widths: tuple[int, ...], item_bytes: int) -> None:
    padded = tuple(padded_widths(widths))
    assert choose_tiling(padded, item_bytes, shared_bytes).shared_bytes(padded, item_bytes) <= shared_bytes


def test_hopper_keeps_its_quickest_tiling() -> None:
    assert choose_tiling((128, 64, 128), 2, CARDS[90]).stages == 3


@pytest.mark.check("cards")
def test_kernels_compile_within_the_shared_memory_of_each_card() -> None:
    program = [sys.executable, "-m", "tests.support.compiled_for_cards", *map(str, CARDS)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    assert len(rows) == len(CARDS) * (len(WIDTHS) + 2)
    assert not [row for row in rows if int(row[1]) > CARDS[int(row[0])]]
