"""Held-out texts, and how likely an endpoint finds them."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from eval.answers import AnswerLog, DocumentScore
from eval.endpoint import Endpoint

NOT_OFFERED = "not offered by this endpoint (it does not echo prompts with their log probabilities)"
# Few texts are longer. Scored token by token, those few would take longer than all others together.
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
        """`logprobs`: natural logs, of every token that has one."""
        return DocumentScore(self.name, self.digest, -sum(logprobs), len(logprobs))


def unscored(documents: Sequence[Document], log: AnswerLog) -> list[Document]:
    """Those whose very text the log has no score of."""
    known = {score.document: score.digest for score in log.scores.values()}
    return [document for document in documents if known.get(document.name) != document.digest]


async def score_at(endpoint: Endpoint, documents: Sequence[Document], log: AnswerLog) -> bool:
    """Ask the endpoint; false where it cannot say. Raises EndpointUnavailable."""
    for document in documents:
        logprobs = await endpoint.text_logprobs(document.text)
        if logprobs is None:
            return False
        log.add(document.score(logprobs))
    return True
