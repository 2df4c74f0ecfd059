"""Shapes of steps that ranks propose."""

from engine.step.shape import StepShape


def decoding(rows: int, *, stopping: bool = False, waiting_prompts: int = 0) -> StepShape:
    """A step of rows that decode without drafts."""
    return StepShape(rows, stopping=stopping, waiting_prompts=waiting_prompts, rows=rows)
