"""The configuration of drafts."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from mesh.config import INTERNAL, Config

# With more, each step costs more than the last guess brings.
MOST_DRAFTS = 5


class DraftsConfig(Config):
    """Tokens are guessed after each one that is drawn, and verified in the next step (speculative decoding): see
    docs/drafts.md.
    """

    next_n: Annotated[int, Field(ge=0, le=MOST_DRAFTS)] | Literal["auto"] = 0
    """How many, from 0 to 5; 0 guesses none. "auto" chooses for each step: by the number of running requests, by what
    steps take (measured before the worker serves), and by how many guesses turn out right.
    """
    acceptance: Literal["strict", "relaxed"] = "strict"
    """"strict" accepts a guess if it is the token that is drawn in its place, so that tokens do not depend on guesses.
    "relaxed" accepts, while the model thinks (between `<think>` and `</think>`), every guess near the likeliest token:
    more tokens a step, from another distribution. Requests with penalties, a bias or a seed of their own are served
    strictly unless they ask otherwise.
    """
    top_n: int = Field(default=10, ge=1)
    """Relaxed: a guess is accepted only if it is among this many likeliest tokens."""
    delta: float = Field(default=0.6, ge=0, le=1)
    """Relaxed: a guess is accepted only if its probability, at temperature 1, is at most this below the likeliest's."""
    pinned_acceptance: tuple[Annotated[float, Field(ge=0, le=1)], ...] = Field(default=(), json_schema_extra=INTERNAL)
    """For measurements with random weights, whose guesses are all wrong: the share of steps in which a request's first
    guess counts as right, in which its first two do, and so on.
    """

    @model_validator(mode="after")
    def _more_guesses_are_right_less_often(self) -> Self:
        if list(self.pinned_acceptance) != sorted(self.pinned_acceptance, reverse=True):
            raise ValueError("shares of pinned_acceptance must not rise: two guesses are right only if the first is")
        return self

    @property
    def most(self) -> int:
        """The most that are guessed after a token."""
        return MOST_DRAFTS if self.next_n == "auto" else self.next_n
