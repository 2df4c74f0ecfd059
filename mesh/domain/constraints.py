"""What an answer must be, as it travels from the gateway to the engine."""

import msgspec

from mesh.errors import InvalidConstraint

MAX_GRAMMAR_CHARACTERS = 256 * 1024


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """The answer's tokens are drawn among those that a grammar allows, once the free ones before it have ended."""

    # In llguidance's dialect of Lark.
    grammar: str
    # Tokens are free up to the first one with this id; None if none are.
    free_until: int | None = None
    # With free_until: they are free only if the answer begins with this token.
    opened_by: int | None = None
    # The answer may end while tokens are free.
    may_end_free: bool = False


def check_constraint(constraint: Constraint, vocabulary_size: int) -> None:
    """Raises InvalidConstraint for what no rank compiles or follows; whether the grammar is one is seen there."""
    size = len(constraint.grammar)
    if size > MAX_GRAMMAR_CHARACTERS:
        limit = MAX_GRAMMAR_CHARACTERS
        raise InvalidConstraint(f"the constraint's grammar has {size} characters, the limit is {limit}: simplify it")
    for token_id in (constraint.free_until, constraint.opened_by):
        if token_id is not None and not 0 <= token_id < vocabulary_size:
            raise InvalidConstraint(f"the constraint names token {token_id}: ids are below {vocabulary_size}")
