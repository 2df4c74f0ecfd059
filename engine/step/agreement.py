"""How the ranks of a worker agree on the shape of each step."""

from typing import Protocol

from engine.step.shape import StepShape

PACKED_BITS = 62


class Agreement(Protocol):
    """Asked once for each step, by every rank, in the same order."""

    @property
    def due(self) -> bool:
        """Whether another rank waits for this one's proposal, so that it has to step even without work.

        If not, this one may sleep until it is woken.
        """
        ...

    def agree(self, proposal: StepShape) -> StepShape:
        """The shape that all ranks launch next, given what this one has to compute. No smaller than the proposal."""
        ...


class OneRank:
    """A worker of one rank does as it proposes."""

    due = False

    def agree(self, proposal: StepShape) -> StepShape:
        return proposal


def packed(shape: StepShape) -> int:
    """The shape as one number below 2**PACKED_BITS.

        bits   0  rows or tokens   20 of them     55  drafts       3
              20  drawing          12             58  decode_only  1
              32  beginning        12             59  stopping     1
              44  waiting_prompts  7              60  decodes      1
              51  dividing         1              61  prefills     1
              52  begun            1

    The configuration bounds every field of more than one bit, and no scheduler takes workers of more than 64 dp ranks.
    `dividing` and `begun` are those of one rank. A shape that only decodes is given by its rows, and its
    tokens are rows * (1 + drafts); any other is given by its tokens. Rows need 19 of the 20 bits: the highest is
    `owes`.
    """
    return (
        (shape.rows | shape.owes << 19 if shape.decode_only else shape.tokens)
        | shape.drawing << 20
        | shape.beginning << 32
        | shape.waiting_prompts << 44
        | (shape.dividing > 0) << 51
        | (shape.begun > 0) << 52
        | shape.drafts << 55
        | shape.decode_only << 58
        | shape.stopping << 59
        | shape.decodes << 60
        | shape.prefills << 61
    )


def agreed(proposal: StepShape, other: int) -> StepShape:
    """The least shape that holds what both propose. They stop together, once both want to.

    other: a packed shape; bits from PACKED_BITS on are ignored. The fields are unpacked by hand, without helper
    functions, because this delays every step of every rank.
    """
    tokens, drafts, rows, owes = other & 0xFFFFF, other >> 55 & 7, 0, False
    decode_only = other >> 58 & 1 == 1
    if decode_only:
        rows, owes = tokens & 0x7FFFF, tokens > 0x7FFFF
        tokens = rows * (1 + drafts)
    drawing, beginning = other >> 20 & 0xFFF, other >> 32 & 0xFFF
    return StepShape(
        tokens=tokens if tokens > proposal.tokens else proposal.tokens,
        decode_only=proposal.decode_only and decode_only,
        stopping=proposal.stopping and other >> 59 & 1 == 1,
        drafts=drafts if drafts > proposal.drafts else proposal.drafts,
        drawing=drawing if drawing > proposal.drawing else proposal.drawing,
        beginning=beginning if beginning > proposal.beginning else proposal.beginning,
        waiting_prompts=proposal.waiting_prompts + (other >> 44 & 0x7F),
        decodes=proposal.decodes or other >> 60 & 1 == 1,
        prefills=proposal.prefills or other >> 61 & 1 == 1,
        rows=rows if rows > proposal.rows else proposal.rows,
        owes=proposal.decode_only and decode_only and (proposal.owes or owes),
        dividing=proposal.dividing + (other >> 51 & 1),
        begun=proposal.begun + (other >> 52 & 1),
    )
