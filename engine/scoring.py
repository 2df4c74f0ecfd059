"""How likely a model finds given texts, computed as it decodes: one token a step, all context read from the KV pool.

`python -m engine.scoring --set engine.model_dir=DIR --set texts=IN --set scores=OUT`: each line of IN is a JSON list of
token ids; the same line of OUT becomes a JSON list of natural logs.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from engine.backend import Backend, execute
from engine.batch import Batch, Row, Sample
from engine.config import EngineConfig
from engine.rank.backends import Backends
from mesh.blocks import BLOCK_TOKENS, blocks_for
from mesh.config import ServiceConfig
from mesh.domain.sampling import Sampling
from mesh.errors import ConfigError
from mesh.launch import launch


class ScoringConfig(ServiceConfig):
    engine: EngineConfig
    texts: Path
    scores: Path


async def main(config: ScoringConfig) -> None:
    """Score every text of the file. Raises ConfigError for a text that cannot be scored, and what loading raises."""
    texts = [msgspec.json.decode(line, type=list[int]) for line in config.texts.read_bytes().splitlines()]
    backend = Backends().make(config.engine)
    scores = token_logprobs(backend, texts, config.engine.max_requests)
    config.scores.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in scores))


def token_logprobs(backend: Backend, texts: Sequence[Sequence[int]], most_rows: int) -> list[list[float]]:
    """For each text, the natural log of the probability of every token but its first, given those before it.

    At most `most_rows` texts run at once. Raises ConfigError for a text that does not fit the context or the pool, or
    whose token ids the model lacks.
    """
    for text in texts:
        _check(backend, text)
    # Texts of like length together: few rows wait for the longest.
    waiting = sorted(range(len(texts)), key=lambda index: len(texts[index]), reverse=True)
    scores: list[list[float]] = [[] for _ in texts]
    while waiting:
        chosen = _fitting(backend, [texts[index] for index in waiting], most_rows)
        group, waiting = waiting[:chosen], waiting[chosen:]
        for index, found in zip(group, _together(backend, [texts[index] for index in group]), strict=True):
            scores[index] = found
    return scores


def _check(backend: Backend, text: Sequence[int]) -> None:
    if len(text) > min(backend.context_tokens, backend.total_blocks * BLOCK_TOKENS):
        raise ConfigError(f"a text of {len(text)} tokens does not fit the context of {backend.context_tokens}")
    if any(not 0 <= token_id < backend.vocabulary_size for token_id in text):
        raise ConfigError(f"a text has token ids outside the vocabulary of {backend.vocabulary_size}")


def _fitting(backend: Backend, texts: Sequence[Sequence[int]], most_rows: int) -> int:
    """How many of the first texts the pool holds at once; at least one."""
    needed = count = 0
    for text in texts[:most_rows]:
        needed += blocks_for(len(text))
        if needed > backend.total_blocks:
            break
        count += 1
    assert count, "checked before"
    return count


def _together(backend: Backend, texts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Texts from the longest to the shortest, each in blocks of its own."""
    blocks = list(_consecutive_blocks(texts))
    # Ask for the whole vocabulary: whatever the next token is, its log probability is there.
    sampling = Sampling(top_logprobs=backend.vocabulary_size)
    scores: list[list[float]] = [[] for _ in texts]
    for position in range(len(texts[0]) - 1):
        rows = [
            Row(text[position : position + 1], position, owned, sampling)
            for text, owned in zip(texts, blocks, strict=True)
            if len(text) > position + 1
        ]
        samples = execute(backend, Batch(position, rows))
        for index, sample in enumerate(samples):
            scores[index].append(_logprob(sample, texts[index][position + 1]))
    return scores


def _consecutive_blocks(texts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    first = 0
    for text in texts:
        yield list(range(first, first + blocks_for(len(text))))
        first += blocks_for(len(text))


def _logprob(sample: Sample | None, token_id: int) -> float:
    assert sample is not None and sample.logprobs is not None
    (logprobs,) = sample.logprobs
    return logprobs.top_logprobs[logprobs.top_token_ids.index(token_id)]


if __name__ == "__main__":
    sys.exit(launch("scoring", ScoringConfig, main))
