"""Held-out texts, and their likelihood at an endpoint."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from eval.answers import AnswerLog, DocumentScore
from eval.endpoint import Endpoint

NOT_OFFERED = "not offered by this endpoint (it does not echo prompts with their log probabilities)"
# Longer texts are left out: they are few, but scoring them token by token would take longer than all others together.
LONGEST_CHARACTERS = 2000


@dataclass(frozen=True)
class Document:
    """A held-out text."""

    name: str
    text: str

    @property
    def digest(self) -> str:
        return blake2b(self.text.encode(), digest_size=6).hexdigest()

    def score(self, logprobs: Sequence[float]) -> DocumentScore:
        """The score. logprobs: the natural log of the probability of every token that has one."""
        return DocumentScore(self.name, self.digest, -sum(logprobs), len(logprobs))


def unscored(documents: Sequence[Document], log: AnswerLog) -> list[Document]:
    """The documents whose present text has no score in the log."""
    known = {score.document: score.digest for score in log.scores.values()}
    return [document for document in documents if known.get(document.name) != document.digest]


async def score_at(endpoint: Endpoint, documents: Sequence[Document], log: AnswerLog) -> bool:
    """Score documents at the endpoint. Returns False if it cannot give likelihoods. Raises EndpointUnavailable."""
    for document in documents:
        logprobs = await endpoint.text_logprobs(document.text)
        if logprobs is None:
            return False
        log.add(document.score(logprobs))
    return True
