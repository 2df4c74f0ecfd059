"""Examples to batches."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from models.train.batch import IGNORED
from models.train.packing import BatchShape, Document, choose, pack, tokenize
from tests.support.tiny_training import make_source, make_tokenizer
from tools.chat import Example, Turn, conversation, learned_conversation
from tools.tokenizer_files import END

SHAPE = BatchShape(tokens=64, longest=20, documents=4)
documents = st.builds(
    lambda learned: Document(list(range(100, 101 + len(learned))), [False, *learned]),
    st.lists(st.booleans(), min_size=2, max_size=19),
)


def test_only_the_completion_is_learned_and_only_within_its_document() -> None:
    members = [Document([10, 11, 12, 13], [False, False, True, True]), Document([20, 21, 22], [False, True, True])]
    batch = pack(members, SHAPE)
    assert batch.targets[:8].tolist() == [IGNORED, 12, 13, IGNORED, 21, 22, IGNORED, IGNORED]
    assert batch.second_targets[:8].tolist() == [12, 13, IGNORED, IGNORED, 22, IGNORED, IGNORED, IGNORED]
    assert batch.positions[:7].tolist() == [0, 1, 2, 3, 0, 1, 2]


@given(st.lists(documents, max_size=12))
def test_boundaries_cut_a_batch_into_short_pieces(members: list[Document]) -> None:
    chosen, _ = choose(members, SHAPE)
    batch = pack(chosen, SHAPE)
    lengths = np.diff(batch.boundaries)
    assert lengths.sum() == SHAPE.tokens
    assert lengths.min() >= 0
    assert lengths.max() <= SHAPE.longest
    assert lengths[: len(chosen)].tolist() == [len(document.tokens) for document in chosen]


@given(st.lists(documents, max_size=12))
def test_choosing_loses_no_document_and_overfills_no_batch(members: list[Document]) -> None:
    chosen, rest = choose(members, SHAPE)
    assert sorted(map(id, chosen + rest)) == sorted(map(id, members))
    assert sum(len(document.tokens) for document in chosen) <= SHAPE.tokens
    assert len(chosen) <= SHAPE.documents


def test_equal_seeds_make_equal_batches_and_workers_differ() -> None:
    first, again, other = (next(make_source().batches(worker)) for worker in (0, 0, 1))
    assert np.array_equal(first.tokens, again.tokens)
    assert not np.array_equal(first.tokens, other.tokens)


def test_context_and_completion_are_tokenized_apart() -> None:
    tokenizer = make_tokenizer()
    document = tokenize(tokenizer, [Example("<think>", "add")])[0]
    assert not document.learned[0]
    assert all(document.learned[1:])
    assert tokenizer.decode(document.tokens[1:]) == "add"


def test_answers_of_all_turns_are_learned_in_the_same_text() -> None:
    turns = [Turn("ask", "tell"), Turn("more", "end", "hm")]
    tokenizer = make_tokenizer()
    last, every = tokenize(tokenizer, [conversation(turns, "be kind"), learned_conversation(turns, "be kind")])
    assert every.tokens == last.tokens
    text = [tokenizer.decode([token], skip_special_tokens=False) for token in every.tokens]
    learned = "".join(piece for piece, wanted in zip(text, every.learned, strict=True) if wanted)
    assert learned == f"tell{END}hm</think>end{END}"
