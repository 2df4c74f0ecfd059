"""How fast a worker is before it serves: a step that decodes, and a step of one prompt."""

import time
from collections.abc import Callable
from math import isqrt

from engine.backend import Backend
from engine.batch import Batch, Row
from engine.config import EngineConfig
from engine.pace.draft_depth import PRIOR
from engine.pace.timed_steps import decoding, drawn_tokens, quickest_step
from engine.step.shape import shape_of
from mesh.blocks import blocks_for
from mesh.domain.sampling import Sampling
from mesh.domain.workers import PromptPace, WorkerSpeed

# Tokens of each context of a step that decodes, if the model's context is that long.
CONTEXT_TOKENS = 1024
# Tokens of the prompt on a backend that computes while the host waits: more would only make the start longer.
PROMPT_TOKENS = 128
PROMPT_REPEATS = 1


def measure_speed(
    backend: Backend, config: EngineConfig, block: int, rank: int = 0, clock: Callable[[], float] = time.perf_counter
) -> WorkerSpeed:
    """All ranks of a worker call it at once. block, rank: see `timed_steps.decoding`."""
    # Placement scales its cost model by this one point: between a request alone and a full batch.
    requests = isqrt(config.max_requests)
    # If each step's number of drafts is chosen, a worker that is full takes none.
    drafts = 0 if config.drafts.next_n == "auto" else config.drafts.next_n
    end = min(CONTEXT_TOKENS, backend.context_tokens)
    seconds = quickest_step(backend, *decoding(backend, requests, drafts, end, block, rank), clock=clock)
    tokens = min(config.max_step_tokens, backend.context_tokens - 1)
    if not backend.asynchronous:
        tokens = min(tokens, PROMPT_TOKENS)
    prompt = Batch(0, [Row(drawn_tokens(backend, tokens, rank), 0, [block] * blocks_for(tokens), Sampling())])
    prompt_seconds = quickest_step(backend, prompt, shape_of(prompt.rows), PROMPT_REPEATS, clock)
    return WorkerSpeed(
        decode_step_ms=seconds * 1000 / (1 + sum(PRIOR[:drafts])),
        decode_step_requests=float(requests),
        prompts=PromptPace(tokens / prompt_seconds, tokens / 2, float(tokens)),
    )
