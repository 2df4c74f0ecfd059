"""The shape of a step, on which the ranks of a worker agree."""

from collections.abc import Sequence

import msgspec

from engine.batch import Row


class StepShape(msgspec.Struct, frozen=True, array_like=True):
    """What the ranks of a worker agree on before they launch a step together."""

    # The most tokens that any rank computes; kernels are chosen by it. 0 if no rank has anything to compute. Rows that
    # decode count with all drafts that they may have.
    tokens: int
    # Whether each row of each rank computes one token, one token and its drafts, or so few tokens of a prompt that they
    # are computed as decode rows: see engine.pace.tails.
    decode_only: bool = True
    # Whether the ranks end before this step.
    stopping: bool = False
    # How many tokens are guessed after each drawn token.
    drafts: int = 0
    # The most rows that draw, and so guess, on any rank.
    drawing: int = 0
    # The most prompts that any rank begins: a draft layer computes one more token of each.
    beginning: int = 0
    # On how many ranks at least one prompt waits to begin. For engine.pace.alignment.
    waiting_prompts: int = 0
    # Whether some rank decodes.
    decodes: bool = False
    # Whether some rank computes a prompt that is not done after the step.
    prefills: bool = False
    # The most rows of a decode graph that any rank takes: a prompt's few tokens may take several.
    rows: int = 0
    # Whether prompts of some rank must wait after this step too (engine.pace.mixed_steps). False unless `decode_only`.
    owes: bool = False
    # On how many ranks a prompt is left of which all ranks compute chunks together, and on how many of these it has
    # begun. For engine.pace.turns.
    dividing: int = 0
    begun: int = 0


def shape_of(rows: Sequence[Row]) -> StepShape:
    """The shape of a step that this rank computes alone."""
    tokens = [row.tokens for row in rows]
    return StepShape(
        sum(tokens),
        decode_only=all(row.decodes and row.prompt_logprobs is None for row in rows),
        drafts=max((row.drafts for row in rows), default=0),
        drawing=sum(row.sampling is not None for row in rows),
        beginning=sum(row.start == 0 for row in rows),
        prefills=any(row.sampling is None for row in rows),
        rows=len(rows),
    )
