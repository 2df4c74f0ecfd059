"""Grammars that would end the process, or compute for long."""

import json

import pytest
from llguidance import LLTokenizer

from mesh.errors import ConfigError
from mesh.text.grammars import check_grammar, compile_grammar, load_grammar_tokenizer


def rules(levels: int, name: str, body: str = '"a" {}') -> str:
    """A chain of rules or terminals in Lark."""
    chain = [f"{name}{level}: {body.format(f'{name}{level + 1}')}" for level in range(levels)]
    return "\n".join((f"start: {name}0", *chain, f'{name}{levels}: "z"'))


def references(levels: int) -> str:
    """A chain of schemas in which each refers to the next."""
    chain = {
        f"a{level}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{level + 1}"}}}
        for level in range(levels)
    }
    schema = {"$ref": "#/$defs/a0", "$defs": {**chain, f"a{levels}": {"type": "string"}}}
    return f"start: %json {json.dumps(schema, separators=(',', ':'))}"


# On a stack of 8 MB the process ends at 930, 2,700 and 3,500 levels.
DEEP = {
    "references": references(1800),
    "rules": rules(5000, "r"),
    "terminals": rules(6000, "T"),
}


@pytest.mark.parametrize("case", DEEP)
def test_a_long_chain_does_not_end_the_process(case: str) -> None:
    check_grammar(DEEP[case])
    compile_grammar(LLTokenizer("byte"), DEEP[case])


def test_a_chain_of_nested_rules_does_not_end_the_process() -> None:
    # There the process ends at 140 levels. A full grammar has 4,000, which is more symbols than the library takes.
    check_grammar(rules(1000, "r", "[" * 28 + "{}" + "]" * 28))


@pytest.mark.parametrize(
    "description",
    [b"", b"[]", b'{"model": []}', b'{"added_tokens": [true]}', b'{"added_tokens": 5}', b'{"a":' * 10_000],
    ids=["empty", "list", "list of models", "token", "number of tokens", "nested deeply"],
)
def test_a_malformed_tokenizer_is_told_from_an_unknown_one(description: bytes) -> None:
    with pytest.raises(ConfigError, match="the tokenizer is malformed"):
        load_grammar_tokenizer(description, 16, frozenset({0}))
