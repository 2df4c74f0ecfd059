"""The measurements by which the depth of drafts is chosen."""

import logging

import pytest

from engine.batch import Batch
from engine.drafts.depth_times import measure_depths
from engine.oracle.backend import OracleBackend, OracleStep
from engine.step.shape import StepShape
from tests.support.engines import oracle_config


class Watched(OracleBackend):
    def __init__(self) -> None:
        super().__init__(oracle_config(total_blocks=4))
        self.launched: list[tuple[Batch, StepShape]] = []

    def launch(self, batch: Batch, shape: StepShape) -> OracleStep:
        self.launched.append((batch, shape))
        return super().launch(batch, shape)


def test_steps_guess_after_each_of_their_rows(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    backend = Watched()
    times = measure_depths(backend, 3, 2, block=0)
    # The log has the measurements by which the depth is chosen.
    logged = [vars(record)["fields"] for record in caplog.records]
    assert [each["rows"] for each in logged] == [1, 2, 3]
    assert [len(each["ms"].split(",")) for each in logged] == [3, 3, 3]
    assert times.rows == [1, 2, 3]
    assert {(len(batch.rows), shape.drawing, shape.drafts) for batch, shape in backend.launched} == {
        (rows, rows, depth) for rows in (1, 2, 3) for depth in (0, 1, 2)
    }


def test_most_depths_are_interpolated() -> None:
    backend = Watched()
    [seconds] = measure_depths(backend, 1, 5, block=0).seconds
    assert {shape.drafts for _, shape in backend.launched} == {0, 1, 5}
    assert seconds[3] == pytest.approx((seconds[1] + seconds[5]) / 2)
