"""Makes batches from examples: they are tokenized and packed whole into flat batches of equal size."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from random import Random

import numpy as np
from tokenizers import Tokenizer

from eval.library_text import LibraryEntry
from eval.tasks import LONG_TASKS
from models.train.batch import IGNORED, Batch
from models.train.mixture import ExampleStream, Mixture
from tools.chat import Example

# Examples tokenized at once.
CHUNK = 64
# The pool has documents for this many batches, so that nearly every gap in a batch finds a document that fits.
POOL_BATCHES = 1.5


@dataclass(frozen=True)
class BatchShape:
    tokens: int
    # Longer documents are left out.
    longest: int
    # At most this many documents in a batch.
    documents: int

    def shrunk(self, tokens: int) -> "BatchShape":
        return BatchShape(tokens, min(tokens, self.longest), self.documents)

    @property
    def most_boundaries(self) -> int:
        """Most boundaries of documents and padding. The padding is cut into pieces as long as the longest document."""
        return self.documents + -(-self.tokens // self.longest) + 1


@dataclass(frozen=True)
class Document:
    """A tokenized example."""

    tokens: Sequence[int]
    # Whether each token is learned rather than given.
    learned: Sequence[bool]


def tokenize(tokenizer: Tokenizer, examples: Sequence[Example]) -> list[Document]:
    """Tokenize contexts and completions separately, as in inference, where the context is tokenized alone."""
    pieces = [[*chain(*example.earlier), example.context, example.completion] for example in examples]
    encoded = iter(tokenizer.encode_batch_fast(list(chain(*pieces)), add_special_tokens=False))
    documents = []
    for members in pieces:
        ids = [next(encoded).ids for _ in members]
        learned = [[index % 2 == 1] * len(piece) for index, piece in enumerate(ids)]
        documents.append(Document(list(chain(*ids)), list(chain(*learned))))
    return documents


def pack(documents: Sequence[Document], shape: BatchShape) -> Batch:
    """A batch of these documents, which must fit, filled up with padding that is not learned."""
    tokens = np.zeros(shape.tokens, dtype=np.int16)
    positions = np.zeros(shape.tokens, dtype=np.int16)
    targets = np.full(shape.tokens, IGNORED, dtype=np.int16)
    second = np.full(shape.tokens, IGNORED, dtype=np.int16)
    boundaries = np.full(shape.most_boundaries, shape.tokens, dtype=np.int32)
    begin = 0
    for index, document in enumerate(documents):
        boundaries[index] = begin
        size = len(document.tokens)
        end = begin + size
        ids = np.asarray(document.tokens)
        tokens[begin:end] = ids
        positions[begin:end] = np.arange(size)
        wanted = np.where(document.learned, ids, IGNORED)
        targets[begin : end - 1] = wanted[1:]
        second[begin : end - 2] = wanted[2:]
        begin = end
    # The attention kernel is told the longest document's length, which no piece of padding may exceed.
    padding = np.arange(begin, shape.tokens, shape.longest)
    boundaries[len(documents) : len(documents) + len(padding)] = padding
    return Batch(tokens, positions, targets, second, boundaries, longest=shape.longest)


def choose(pool: list[Document], shape: BatchShape) -> tuple[list[Document], list[Document]]:
    """The documents of one batch, which are the first that fit, and those left for later."""
    members: list[Document] = []
    rest: list[Document] = []
    room = shape.tokens
    for document in pool:
        if len(document.tokens) <= room and len(members) < shape.documents:
            members.append(document)
            room -= len(document.tokens)
        else:
            rest.append(document)
    return members, rest


@dataclass(frozen=True)
class BatchSource:
    """Makes batches. It can be sent to another process."""

    tokenizer: Tokenizer
    library: Sequence[LibraryEntry]
    characters_per_token: Mapping[str, float]
    mixture: Mixture
    shape: BatchShape
    seed: int

    def batches(self, worker: int) -> Iterator[Batch]:
        """Batches without end; each worker has examples of its own."""
        stream = iter(ExampleStream(self.mixture, self.library, f"{self.seed}/{worker}", self.characters_per_token))
        pool: list[Document] = []
        while True:
            while sum(len(document.tokens) for document in pool) < POOL_BATCHES * self.shape.tokens:
                documents = tokenize(self.tokenizer, list(islice(stream, CHUNK)))
                pool += [document for document in documents if len(document.tokens) <= self.shape.longest]
            members, pool = choose(pool, self.shape)
            yield pack(members, self.shape)


def measure_characters_per_token(tokenizer: Tokenizer) -> dict[str, float]:
    """The mean characters of a token in each long task's prompts."""
    ratios = {}
    for name, task in LONG_TASKS.items():
        random = Random(0)
        prompt = task.around(random, task.fact(random), 20_000).prompt
        ratios[name] = len(prompt) / len(tokenizer.encode(prompt, add_special_tokens=False).ids)
    return ratios
