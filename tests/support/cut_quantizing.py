"""Runs of the quantizer that end in the middle."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tools.quantize.output import Output, UnitReport


class Cut(Exception):
    pass


@contextmanager
def cut_off_at(unit: str) -> Iterator[None]:
    """End the quantizer that runs in the block before it writes the unit of this name. It must come to that unit."""
    write = Output.write

    def write_until(self: Output, report: UnitReport, tensors: dict[str, torch.Tensor]) -> None:
        if report.name == unit:
            raise Cut
        write(self, report, tensors)

    with pytest.MonkeyPatch.context() as patched, pytest.raises(Cut):
        patched.setattr(Output, "write", write_until)
        yield
