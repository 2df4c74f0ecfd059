"""What a pair of tokens costs a mesh's workers where attention is sparse. Pure."""

from collections.abc import Sequence
from statistics import median

from deepmesh.internal.v1 import scheduler_pb2

from mesh.costs import MILLION


def sparse_prompt_tokens(workers: Sequence[scheduler_pb2.WorkerStatus]) -> int | None:
    """Length of a prompt of which half is attended to sparsely, as far as contexts allow; None if no worker does so."""
    return min(
        (
            min(2 * worker.identity.sparse_prefill.from_tokens, worker.identity.context_tokens - 1)
            for worker in workers
            if worker.identity.HasField("sparse_prefill")
        ),
        default=None,
    )


def sparse_pairs_ms(workers: Sequence[scheduler_pb2.WorkerStatus], token_ms: float) -> float | None:
    """Milliseconds of a million pairs: the median of the workers that have computed sparse prompts; None if none has.

    token_ms: a prompt's token without what came before it.
    """
    paces = [worker.load.sparse_prompts for worker in workers if worker.load.HasField("sparse_prompts")]
    pairs = [
        max(0.0, 1000 / pace.tokens_per_second - token_ms) / pace.context_tokens * MILLION
        for pace in paces
        if pace.context_tokens
    ]
    return median(pairs) if pairs else None
