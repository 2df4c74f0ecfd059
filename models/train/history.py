"""The measurements of a training run, and their plot."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import matplotlib
from matplotlib import pyplot


@dataclass
class Point:
    """Means over a stretch of training, written by the trainer."""

    stage: str
    step: int
    # Seconds of training so far, without evaluation and compilation.
    seconds: float
    next_token_loss: float
    second_token_loss: float
    tokens_per_second: float
    # Load of the busiest expert divided by the mean load, in the layer where this is largest.
    imbalance: float
    # Sum over the layers; 0 if there are no indexers.
    index_loss: float = 0.0


@dataclass
class Evaluation:
    step: int
    seconds: float
    # By task, the share of held-out solutions that are retraced exactly.
    exact: dict[str, float]
    draft_acceptance: float


@dataclass
class History:
    points: list[Point] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        return cls(
            [Point(**point) for point in values["points"]],
            [Evaluation(**evaluation) for evaluation in values["evaluations"]],
        )


def plot(history: History, path: Path) -> None:
    """Losses above, held-out solutions retraced by task below, over seconds of training, as PNG."""
    matplotlib.use("Agg")
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 9), sharex=True)
    seconds = [point.seconds for point in history.points]
    above.plot(seconds, [point.next_token_loss for point in history.points], label="next token")
    above.plot(seconds, [point.second_token_loss for point in history.points], label="token after next (MTP)")
    above.set(ylabel="loss", yscale="log")
    for stage in dict.fromkeys(point.stage for point in history.points):
        begin = next(point.seconds for point in history.points if point.stage == stage)
        above.axvline(begin, color="gray", linewidth=0.5)
        above.annotate(stage, (begin, 1), xycoords=("data", "axes fraction"), va="top", fontsize=8)
    above.legend()
    times = [evaluation.seconds for evaluation in history.evaluations]
    for task in dict.fromkeys(name for evaluation in history.evaluations for name in evaluation.exact):
        below.plot(times, [evaluation.exact.get(task, float("nan")) for evaluation in history.evaluations], label=task)
    drafts = [evaluation.draft_acceptance for evaluation in history.evaluations]
    below.plot(times, drafts, "k--", label="drafts accepted")
    below.set(xlabel="seconds of training", ylabel="share of held-out solutions retraced")
    below.legend(fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
