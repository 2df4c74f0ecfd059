"""What an answer must be, as it travels from the gateway to the engine."""

from collections.abc import Sequence

import msgspec

from mesh.errors import InvalidConstraint

MAX_GRAMMAR_CHARACTERS = 256 * 1024
MAX_BANNED_TOKENS = 4096


class Constraint(msgspec.Struct, frozen=True, array_like=True):
    """The answer's tokens are drawn among those that a grammar allows, once the free ones before it have ended, without
    those that are banned. Where a grammar allows nothing else, it goes before what is banned.
    """

    # In llguidance's dialect of Lark; None allows everything.
    grammar: str | None = None
    # Tokens are free up to the first one with this id; None if none are.
    free_until: int | None = None
    # With free_until: they are free only if the answer begins with this token.
    opened_by: int | None = None
    # The answer may end while tokens are free.
    may_end_free: bool = False
    # None of these sequences of tokens stands in the answer; none is empty.
    banned: Sequence[Sequence[int]] = ()
    # The answer ends with no stop token before it has so many tokens.
    min_tokens: int = 0


def check_constraint(constraint: Constraint, vocabulary_size: int) -> None:
    """Raises InvalidConstraint for what no rank compiles or follows; whether the grammar is one is seen there."""
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
