"""What a pair of tokens costs a mesh's workers if attention is sparse. Pure."""

from collections.abc import Sequence
from statistics import median

from deepmesh.internal.v1 import scheduler_pb2

from mesh.costs import MILLION


def sparse_prompt_tokens(workers: Sequence[scheduler_pb2.WorkerStatus]) -> int | None:
    """Length of a prompt half of which is attended to sparsely, or the longest that contexts allow if that is less.

    None if no worker has sparse attention.
    """
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

    token_ms: time of a prompt's token without attention to earlier ones.
    """
    paces = [worker.load.sparse_prompts for worker in workers if worker.load.HasField("sparse_prompts")]
    pairs = [
        max(0.0, 1000 / pace.tokens_per_second - token_ms) / pace.context_tokens * MILLION
        for pace in paces
        if pace.context_tokens
    ]
    return median(pairs) if pairs else None
