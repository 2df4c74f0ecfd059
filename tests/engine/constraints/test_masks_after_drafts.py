"""The tokens that a row of a constrained answer may draw after each of its drafts."""

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
from llguidance import LLTokenizer

from engine.constraints.answer import AnswerMasks, ConstrainedAnswer, Masks
from engine.constraints.grammar import SharedGrammar
from launcher.shipped_model import shipped_model
from mesh.domain.constraints import Constraint
from mesh.errors import InvalidConstraint
from mesh.text.grammars import compile_grammar, load_grammar_tokenizer
from mesh.text.tokenizer_file import read_tokenizer

EOS = 1
# tiny-r1's <think> and </think>; a text that is spelled like them is made of other tokens.
THINK_TOKENS = (5, 6)
VOCABULARY: int = json.loads((shipped_model() / "config.json").read_text())["vocab_size"]
COLOURS = Constraint('start: %json {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 9}')


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return load_grammar_tokenizer(read_tokenizer(Path(shipped_model())), VOCABULARY, frozenset({EOS}))


def answer_to(
    tokenizer: LLTokenizer, constraint: Constraint, given: list[int] | None = None, stops: frozenset[int] = frozenset()
) -> ConstrainedAnswer:
    grammar = None if constraint.grammar is None else SharedGrammar(compile_grammar(tokenizer, constraint.grammar))
    answer = ConstrainedAnswer(constraint, grammar, VOCABULARY, frozenset({EOS}), stops | {EOS})
    answer.advance(given or [])
    return answer


def spelled(masks: Masks) -> list[bytes | None]:
    assert masks.error is None
    return [None if bits is None else bits.tobytes() for bits in masks.allowed]


def allowed_after(tokenizer: LLTokenizer, constraint: Constraint, token_ids: list[int]) -> bytes | None:
    """What an answer that never saw a draft allows after these tokens."""
    (bits,) = spelled(answer_to(tokenizer, constraint, token_ids).masks())
    return bits


def test_masks_after_drafts_allow_what_the_answer_would_allow(tokenizer: LLTokenizer) -> None:
    tokens = tokenizer.tokenize_str('["red", "green", "red"]')
    answer = answer_to(tokenizer, COLOURS)
    for place in range(len(tokens)):
        drafts = tokens[place : place + 3]
        expected = [allowed_after(tokenizer, COLOURS, tokens[:stop]) for stop in range(place, place + len(drafts) + 1)]
        assert spelled(answer.masks(drafts)) == expected
        answer.advance(tokens[place : place + 1])


def test_nothing_follows_a_draft_that_is_refused(tokenizer: LLTokenizer) -> None:
    right, wrong = tokenizer.tokenize_str('["red"'), tokenizer.tokenize_str("?")
    answer = answer_to(tokenizer, COLOURS)
    for place in range(len(right)):
        assert len(answer.masks([*right[:place], *wrong, *right]).allowed) == 1 + place
    # Afterwards the answer is as if nothing had been guessed.
    answer.advance(right)
    assert spelled(answer.masks()) == [allowed_after(tokenizer, COLOURS, right)]


@pytest.mark.parametrize("end", [EOS, "stop"])
def test_nothing_follows_a_draft_that_ends_the_answer(tokenizer: LLTokenizer, end: int | str) -> None:
    whole = tokenizer.tokenize_str('["red"]')
    stop = EOS if end == EOS else whole[1]
    drafts = [*whole, EOS, EOS] if end == EOS else whole
    answer = answer_to(tokenizer, COLOURS, stops=frozenset({stop}))
    assert len(answer.masks(drafts).allowed) == 1 + drafts.index(stop)


def test_drafts_of_thoughts_may_be_any_tokens(tokenizer: LLTokenizer) -> None:
    opening, close = THINK_TOKENS
    constraint = Constraint(COLOURS.grammar, free_until=close, opened_by=opening, may_end_free=True)
    begin = tokenizer.tokenize_str('["red"')
    answer = answer_to(tokenizer, constraint)
    found = spelled(answer.masks([opening, 40, 41, close, *begin]))
    assert found[1:4] == [None] * 3
    answers = [[opening, close, *begin[:count]] for count in range(1 + len(begin))]
    assert found[4:] == [allowed_after(tokenizer, constraint, tokens) for tokens in answers]
    # Without thoughts the grammar holds from the first token on.
    assert spelled(answer.masks(begin))[1:] == found[5:]


def test_banned_sequences_and_the_least_length_count_drafts(tokenizer: LLTokenizer) -> None:
    constraint = Constraint(banned=[[50, 51, 52]], min_tokens=3)
    answer = answer_to(tokenizer, constraint, [50])
    found = answer.masks([51, 53, 54, 50, 51]).allowed
    forbidden = [
        {token_id for token_id in (EOS, 52) if bits is not None and not bits[token_id // 8] >> token_id % 8 & 1}
        for bits in found
    ]
    assert forbidden == [{EOS}, {EOS, 52}, set(), set(), set(), {52}]
    assert len(answer.masks([51, 52, 53]).allowed) == 2


def test_a_rejected_drafts_failed_mask_is_forgotten(tokenizer: LLTokenizer) -> None:
    # After "q" there are too many ways to go on for a mask.
    ways = " ".join(f"x{number}?" for number in range(1000))
    rules = "\n".join(f'x{number}: "a{number}"' for number in range(1000))
    constraint = Constraint(f'start: "p"+ ("q" {ways} | "r")\n{rules}')
    (p,), (q,), (r,) = (tokenizer.tokenize_str(text) for text in "pqr")
    answer = answer_to(tokenizer, constraint, [p])
    found = answer.masks([p, q, r])
    assert found.error is not None
    assert [bits is not None and bits.tobytes() for bits in found.allowed] == [
        allowed_after(tokenizer, constraint, [p] * count) for count in (1, 2)
    ]
    answer.advance([p, r])
    assert spelled(answer.masks([q])) == [allowed_after(tokenizer, constraint, [p, p, r])]
    with pytest.raises(InvalidConstraint):
        answer.advance([q])


def test_an_answer_ends_with_the_row_that_passes_its_masks(tokenizer: LLTokenizer) -> None:
    error = InvalidConstraint("too many ways to go on")

    class FailingAnswer:
        def masks(self, drafts: Sequence[int] = ()) -> Masks:
            return Masks([None, None], error) if drafts else Masks([None])

        def advance(self, token_ids: Sequence[int]) -> None:
            pass

    with ThreadPoolExecutor(1) as thread:
        masks = AnswerMasks(cast(ConstrainedAnswer, FailingAnswer()), thread)
        assert len(masks.wait()) == 1 and masks.failure(4) is None
        masks.follow([5], [6, 7])
        assert len(masks.wait()) == 2
        assert masks.failure(2) is None and masks.failure(3) is error
