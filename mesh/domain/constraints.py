"""The constraint on an answer, as it travels from the gateway to the engine."""

from collections.abc import Sequence

import msgspec

from mesh.errors import InvalidConstraint

MAX_GRAMMAR_CHARACTERS = 256 * 1024
MAX_BANNED_TOKENS = 4096


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """Tokens are free (unconstrained) at first, if `free_until` is set; after that they are drawn among those that the
    grammar allows, without those that are banned. If the grammar allows only banned tokens, the grammar wins.
    """

    # In llguidance's dialect of Lark; None allows everything.
    grammar: str | None = None
    # Tokens are free up to and including the first one with this id; None if none are free.
    free_until: int | None = None
    # With free_until: tokens are free only if the answer begins with this token.
    opened_by: int | None = None
    # Whether the answer may end while tokens are still free.
    may_end_free: bool = False
    # Token sequences that the answer must not contain; none of them is empty.
    banned: Sequence[Sequence[int]] = ()
    # No stop token may end the answer before it has this many tokens.
    min_tokens: int = 0


def check_constraint(constraint: Constraint, vocabulary_size: int) -> None:
    """Raises InvalidConstraint for a constraint that no rank could compile or follow. Only the rank checks the grammar
    itself.
    """
    size = len(constraint.grammar or "")
    if size > MAX_GRAMMAR_CHARACTERS:
        limit = MAX_GRAMMAR_CHARACTERS
        raise InvalidConstraint(f"the constraint's grammar has {size} characters, the limit is {limit}: simplify it")
    if not all(constraint.banned) or sum(map(len, constraint.banned)) > MAX_BANNED_TOKENS:
        raise InvalidConstraint(f"banned sequences hold at least one token, and {MAX_BANNED_TOKENS} together")
    named = [constraint.free_until, constraint.opened_by, *(each for word in constraint.banned for each in word)]
    for token_id in named:
        if token_id is not None and not 0 <= token_id < vocabulary_size:
            raise InvalidConstraint(f"the constraint names token {token_id}: ids are below {vocabulary_size}")
