"""Compiles grammars within bounds of time and memory, whatever grammar a client writes.

The library goes from rule to rule, and from reference to reference, by recursion. A chain of them that fills a grammar
of 256 KiB takes up to 224 MB of stack (measured with llguidance 1.9): on a usual one it would end the process.
"""

import re
from functools import partial
from secrets import token_hex
from typing import Any

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mesh.errors import ConfigError, InvalidConstraint
from mesh.text.deep_stack import on_deep_stack
from mesh.text.schema_bounds import check_schemas
from mesh.text.tokenizer_file import NumberedTokens

MAX_COMPLAINT_CHARACTERS = 300
_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")
# The library's message if no token can follow and the answer cannot end either.
_NOTHING_FOLLOWS = "NoExtensionBias"


def limits() -> LLParserLimits:
    """Limits under which a mask takes a few milliseconds at most, and compiling about a second.

    Measured on 400 schemas of JSONSchemaBench with DeepSeek's vocabulary: the slowest mask took 3.5 ms of a core, and
    one more schema failed during generation than with llguidance's own limits.
    """
    return LLParserLimits(
        step_lexer_fuel=50_000,
        step_max_items=20_000,
        max_lexer_states=50_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


def load_grammar_tokenizer(tokenizer_json: bytes, vocabulary_size: int, eos_token_ids: frozenset[int]) -> LLTokenizer:
    """The vocabulary for masks, from tokenizer.json. Loading may take seconds, during which no other thread runs.

    Grammars refer to control tokens by id only. Raises ConfigError if the file is malformed, ValueError if the library
    does not know its kind of tokenizer.
    """
    try:
        description = msgspec.json.decode(tokenizer_json, type=dict[str, Any])
        msgspec.convert(description, NumberedTokens)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"the tokenizer is malformed: {error}") from error
    _hide_control_tokens(description)
    text = msgspec.json.encode(description).decode()
    return LLTokenizer(text, n_vocab=vocabulary_size, eos_token=sorted(eos_token_ids))


def _hide_control_tokens(description: dict[str, Any]) -> None:
    """Give control tokens names that no client can know, so that only their ids can produce them.

    If a grammar forces some text, the library tokenizes it with the whole vocabulary. The text "</think>" in a list of
    choices would become the control token, which ends the answer or the reasoning, or is no text to the grammar.
    """
    vocabulary = description.get("model", {}).get("vocab")
    secret = token_hex(8)
    for token in description.get("added_tokens", []):
        text, token["content"], token["special"] = token["content"], f"{secret}-{token['id']}", True
        if isinstance(vocabulary, dict) and text in vocabulary:
            vocabulary[token["content"]] = vocabulary.pop(text)


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher at the start of the grammar. Other threads run during the compilation.

    Raises InvalidConstraint, also if no token can begin an answer.
    """
    check_schemas(grammar)
    return on_deep_stack(partial(_compile, tokenizer, grammar))


def _compile(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    if matcher.is_error():
        raise InvalidConstraint(f"the constraint cannot be compiled: {complaint(matcher.get_error())}")
    # Compute a first mask now: if reasoning precedes the answer, the error would otherwise appear only after it.
    begun = matcher.deep_copy()
    begun.compute_bitmask()
    if begun.is_error():
        raise InvalidConstraint(f"the constraint cannot be followed: {complaint(begun.get_error())}")
    return matcher


def check_grammar(grammar: str) -> None:
    """Raises InvalidConstraint if the text is invalid for any vocabulary. Other threads run during the check."""
    check_schemas(grammar)
    try:
        wrong, messages = on_deep_stack(
            partial(LLMatcher.validate_grammar_with_warnings, grammar, None, limits=limits())
        )
    except BaseException as error:
        # A panic in Rust is no subclass of Exception, and its class has no name to import. The library panics while it
        # builds a message about a wrong value in a schema, if it cuts the value inside a character.
        if type(error).__name__ != "PanicException":
            raise
        raise InvalidConstraint("the constraint cannot be compiled: a keyword may have a wrong value") from error
    if wrong:
        raise InvalidConstraint(f"the constraint cannot be compiled: {complaint(messages[0])}")


def complaint(error: str) -> str:
    """The error in one line. The library also gives a place, but in a grammar that the client did not write."""
    if _NOTHING_FOLLOWS in error:
        return "no text matches it"
    lines = [line.strip() for line in error.splitlines() if line.strip()] or [error]
    causes = [line for line in lines[1:] if line.startswith("error: ")]
    return _PLACE.sub("", " ".join((lines[0], *causes[:1])))[:MAX_COMPLAINT_CHARACTERS]
