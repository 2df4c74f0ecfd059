"""Which captured graphs compute a step with drafts."""

from collections.abc import Sequence

from engine.batch import Row
from engine.drafts.draft_pass import DraftPass
from engine.drafts.graph import CapturedPass, DraftGraph
from engine.drafts.tail_pass import TailPass
from engine.model.context import DeviceState
from engine.model.model import Model
from engine.runner.capture import Capture
from engine.step.shape import StepShape
from engine.step.two_batch import NEVER, TwoBatch


class DraftGraphs:
    """Graphs by number of rows and depth. A batch runs in the next larger graph, filled up with padding rows. In it
    each row has as many drafts as the depth says; those that the row lacks are NO_TOKEN.
    """

    def __init__(
        self,
        model: Model,
        state: DeviceState,
        sizes: Sequence[int],
        depths: Sequence[int],
        blocks: int,
        capture: Capture,
        two_batch: TwoBatch = NEVER,
    ) -> None:
        """blocks: the most that any row has, with all that is guessed after it; two_batch: which graphs compute the
        model's layers in two micro-batches.
        """
        order = [(rows, depth) for depth in sorted(depths, reverse=True) for rows in sorted(sizes, reverse=True)]
        self._state = state
        self._graphs = {each: DraftGraph(model, state, *each, blocks, two_batch, capture) for each in order}
        self._sizes = sorted(sizes)
        self._depths = frozenset(depths)

    @property
    def most_rows(self) -> int:
        return self._sizes[-1]

    @property
    def count(self) -> int:
        return len(self._graphs)

    def fit(self, shape: StepShape) -> bool:
        all_draw = shape.decode_only and not shape.beginning and not shape.prefills
        return all_draw and 0 < shape.rows <= self._sizes[-1] and shape.drafts in self._depths

    def run(self, rows: Sequence[Row], shape: StepShape) -> DraftPass:
        """Queue the model's layers. To be finished before the next run."""
        graph = self._graphs[next(size for size in self._sizes if size >= shape.rows), shape.drafts]
        if not rows or rows[-1].decodes:
            # Then all rows decode: rows of prompts come last, unless they have one token.
            return CapturedPass(graph, rows)
        return TailPass(graph, self._state, rows)
