"""How a backend launches steps: `PlainSteps`, or `DraftSteps` if its model drafts."""

from collections.abc import Sequence
from typing import NoReturn, Protocol

from engine.backend import Launched
from engine.batch import Batch, Row
from engine.runner.capture import Capture
from engine.runner.launched_step import StepEvents
from engine.runner.micro_batches import MicroBatches
from engine.step.shape import StepShape
from engine.step.two_batch import TwoBatch


class Graphs(Protocol):
    """Captured steps."""

    @property
    def most_rows(self) -> int:
        """Rows of the largest one; 0 if there is none."""
        ...

    @property
    def count(self) -> int: ...

    def fit(self, shape: StepShape) -> bool:
        """Whether a step of this shape runs as a captured one."""
        ...


class NoGraphs:
    """No step is captured."""

    most_rows = count = 0

    def fit(self, shape: StepShape) -> bool:
        return False

    def run(self, rows: Sequence[Row], shape: StepShape) -> NoReturn:
        raise AssertionError("a step was to run as a graph, and none is captured")


class Steps(Protocol):
    """Launches steps: as captured graphs, if there are any that fit, otherwise layer by layer.

    Attributes:
        batches: how rows of other steps than captured ones are cut and padded, and which of these are captured in part.
    """

    batches: MicroBatches

    def shortened(self) -> "Steps":
        """The same over few layers, and none captured: see `Model.short`."""
        ...

    def capture(self, sizes: Sequence[int], longest: int, capture: Capture, two_batch: TwoBatch) -> None:
        """Capture decode steps of these numbers of rows. longest: tokens of a context. two_batch: which of them are
        computed in two micro-batches.
        """
        ...

    @property
    def graphs(self) -> Graphs:
        """What `capture` has captured."""
        ...

    def launch(self, batch: Batch, shape: StepShape, events: StepEvents | None) -> Launched:
        """Queue all before the draws. events: None on a CPU."""
        ...
