"""Compiles grammars, within bounds of time and memory that hold for every grammar a client may write."""

import json
import re
from pathlib import Path
from secrets import token_hex
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mesh.errors import InvalidConstraint

MAX_COMPLAINT_CHARACTERS = 300
_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")
# How the library says that no token goes on, and none may end the answer either.
_NOTHING_FOLLOWS = "NoExtensionBias"


def limits() -> LLParserLimits:
    """A mask then takes a few milliseconds at the most, and compiling about a second.

    Measured on 400 schemas of JSONSchemaBench with DeepSeek's vocabulary: the slowest mask took 3.5 ms of a core, and
    one more schema than with llguidance's own limits was given up while its answer was drawn.
    """
    return LLParserLimits(
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def load_grammar_tokenizer(path: Path, vocabulary_size: int, eos_token_ids: frozenset[int]) -> LLTokenizer:
    """The vocabulary that masks are made for, from tokenizer.json. It may take seconds, in which no thread runs.

    Grammars name control tokens by their ids alone.
    """
    description = json.loads(path.read_text(encoding="utf-8"))
    _hide_control_tokens(description)
    return LLTokenizer(json.dumps(description), n_vocab=vocabulary_size, eos_token=sorted(eos_token_ids))


def _hide_control_tokens(description: dict[str, Any]) -> None:
    """Give control tokens names that no client can know, and allow them nowhere but by their ids.

    The library spells what a grammar forces with the whole vocabulary. So the text "</think>" in a list of choices
    would become the control token, which ends the answer, or the reasoning, or is no text to the grammar.
    """
    vocabulary = description.get("model", {}).get("vocab")
    secret = token_hex(8)
    for token in description.get("added_tokens", []):
        text, token["content"], token["special"] = token["content"], f"{secret}-{token['id']}", True
        if isinstance(vocabulary, dict) and text in vocabulary:
            vocabulary[token["content"]] = vocabulary.pop(text)


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the grammar's begin. Other threads run meanwhile.

    Raises InvalidConstraint, also if no token can begin an answer.
    """
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    if matcher.is_error():
        raise InvalidConstraint(f"the constraint cannot be compiled: {complaint(matcher.get_error())}")
    # Where reasoning comes first this would else be found only behind it.
    begun = matcher.deep_copy()
    begun.compute_bitmask()
    if begun.is_error():
        raise InvalidConstraint(f"the constraint cannot be followed: {complaint(begun.get_error())}")
    return matcher


def check_grammar(grammar: str) -> None:
    """Raises InvalidConstraint for what no vocabulary makes a grammar; other threads run meanwhile."""
    try:
        wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=limits())
    except BaseException as error:
        # Rust's panics come as no Exception, and their class has no name to import. The library panics where it cuts a
        # wrong value of a schema, which it is about to tell of, within a character.
        if type(error).__name__ != "PanicException":
            raise
        raise InvalidConstraint("the constraint cannot be compiled: a keyword may have a wrong value") from error
    if wrong:
        raise InvalidConstraint(f"the constraint cannot be compiled: {complaint(messages[0])}")


def complaint(error: str) -> str:
    """What is wrong, in a line: the library adds the place, in a grammar that the client did not write."""
    if _NOTHING_FOLLOWS in error:
        return "no text matches it"
    lines = [line.strip() for line in error.splitlines() if line.strip()] or [error]
    causes = [line for line in lines[1:] if line.startswith("error: ")]
    return _PLACE.sub("", " ".join((lines[0], *causes[:1])))[:MAX_COMPLAINT_CHARACTERS]
