"""What work costs a worker: the cost model that placement, scaling, the simulator and `deepmesh plan` share."""

from bisect import bisect_left

import msgspec

MILLION = 1e6


class CostModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times of one kind of worker. The defaults are assumed for a worker without measurements."""

    # Points (requests in a decode step, milliseconds of that step), ascending; linear between them and beyond the last.
    decode_steps: tuple[tuple[float, float], ...] = ((1.0, 20.0), (51.0, 39.607843137254903))
    # Context of each request in these measurements, and milliseconds for each further million tokens of context.
    decode_context_tokens: float = 0.0
    decode_context_ms: float = 0.0
    # What decoding adds to a step with prompts, as a share of a decode step's own time: a GPU reads the weights once
    # for both.
    decode_beside_prompts: float = 1.0
    # Speed of prompt tokens apart from attention to earlier tokens, and milliseconds of attention for a million pairs
    # of a prompt token and an earlier token.
    prefill_tokens_per_second: float = 5000.0
    prefill_pairs_ms: float = 0.0
    # To how many tokens each attends at most, if indexers select them; null for models that attend to all. Times of
    # context and of pairs count these alone. In addition there are scores: milliseconds for a million tokens of context
    # in a decode step, and for a million pairs of prompts.
    selected_tokens: float | None = None
    # As selected_tokens, for pairs of prompts, which attend to more tokens in a form in which each takes less time, as
    # long as that is quicker; null for selected_tokens.
    prompt_selected_tokens: float | None = None
    index_context_ms: float = 0.0
    index_pairs_ms: float = 0.0
    # Time of a rank's prompts if no other rank of its worker computes any, as a share of their time if all ranks
    # compute as many.
    prefill_alone: float = 1.0
    # Time of a step with prompts besides its tokens': reading weights, and launching it from the host.
    prefill_step_ms: float = 0.0
    # The host's time to launch a step with prompts, and one that is captured: no such step takes less.
    launch_ms: float = 0.0
    captured_launch_ms: float = 0.0
    # As prefill_pairs_ms, for tokens with sparse attention; null uses prefill_pairs_ms until workers measure it.
    sparse_pairs_ms: float | None = None
    # Push of KV to a decode worker: its rate, and the time of its calls: from the decode worker's landing to the
    # prefill worker's first chunk, and from the last byte of KV to the decode worker's next step.
    push_bytes_per_second: float = 2e9
    handover_ms: float = 5.0
    # Fetch from a store: time before its first byte, and its rate from the store's memory and from its disk.
    fetch_latency_ms: float = 2.0
    fetch_bytes_per_second: float = 1e9
    disk_fetch_bytes_per_second: float = 5e8
    # Copies from a worker's host memory to its KV pool.
    host_read_bytes_per_second: float = 5e9
    # Time that a request spends in gateway and scheduler until a worker has it, and its first token on the way back.
    request_ms: float = 0.0
    # Time from the decision to start a worker until it takes requests.
    start_seconds: float = 60.0

    def __post_init__(self) -> None:
        requests = [at for at, _ in self.decode_steps]
        if not requests or requests != sorted(set(requests)) or requests[0] <= 0:
            raise ValueError("decode_steps needs at least one point, with requests ascending from above 0")
        transfers = (
            self.push_bytes_per_second,
            self.fetch_bytes_per_second,
            self.disk_fetch_bytes_per_second,
            self.host_read_bytes_per_second,
        )
        if min(ms for _, ms in self.decode_steps) <= 0 or min(self.prefill_tokens_per_second, *transfers) <= 0:
            raise ValueError("times of steps and rates must be above 0")

    def decode_ms(self, requests: float) -> float:
        """Milliseconds of a step in which `requests` requests decode, at the measured context."""
        points = self.decode_steps
        if requests <= points[0][0] or len(points) == 1:
            return points[0][1]
        # Placement calls this for each worker, so the usual model of two points skips the search.
        after = 1 if len(points) == 2 else min(max(bisect_left(points, (requests,)), 1), len(points) - 1)
        (left, low), (right, high) = points[after - 1], points[after]
        return low + (high - low) * (requests - left) / (right - left)

    def requests_within(self, ms: float, most: int) -> int:
        """The largest number of requests, at most `most`, whose step takes no longer than `ms`; 0 if none does."""
        return bisect_left(range(1, most + 1), True, key=lambda requests: self.decode_ms(requests) > ms)

    def prefill_ms(self, tokens: float, cached_tokens: float = 0.0) -> float:
        """Milliseconds to compute `tokens` of a prompt after `cached_tokens` of it."""
        most = self.most_pairs
        if most is None:
            return tokens * self.prompt_token_ms(cached_tokens + tokens / 2)
        end = cached_tokens + tokens
        # Tokens before the first whose attention takes no longer, then the others.
        first = min(max(most, cached_tokens), end)
        early = (first - cached_tokens) * self.prompt_token_ms((cached_tokens + first) / 2)
        return early + (end - first) * self.prompt_token_ms((first + end) / 2)

    def sparse_prefill_ms(self, tokens: float, cached_tokens: float = 0.0) -> float:
        """As `prefill_ms`, if all of `tokens` have sparse attention."""
        return tokens * self.prompt_token_ms(cached_tokens + tokens / 2, sparse=True)

    def prompt_token_ms(self, context_tokens: float, sparse: bool = False) -> float:
        """Milliseconds of one prompt token with `context_tokens` before it."""
        pairs_ms = self.prefill_pairs_ms
        if sparse and self.sparse_pairs_ms is not None:
            pairs_ms = self.sparse_pairs_ms
        # As `_context_ms`, without its calls: placement asks several times for each worker.
        attended, most = context_tokens, self.most_pairs
        if most is not None and attended > most:
            attended = most
        context_ms = (attended * pairs_ms + context_tokens * self.index_pairs_ms) / MILLION
        return 1000 / self.prefill_tokens_per_second + context_ms

    @property
    def most_pairs(self) -> float | None:
        """How many earlier tokens at most a prompt's token takes time to attend to; None if each of them does."""
        return self.selected_tokens if self.prompt_selected_tokens is None else self.prompt_selected_tokens

    def step_ms(self, requests: int, context_tokens: int, chunks_ms: float) -> float:
        """Milliseconds of a step that decodes `requests` requests with `context_tokens` in total, and computes
        chunks of prompts. However short the chunks are, the step takes at least as long as one without them.
        """
        prompts_ms = chunks_ms + self.prefill_step_ms if chunks_ms else 0.0
        if not requests:
            return prompts_ms
        costs = self.decode_context_ms, self.index_context_ms
        context_ms = self._context_ms(context_tokens / requests, *costs)
        excess_ms = requests * (context_ms - self._context_ms(self.decode_context_tokens, *costs))
        decode_ms = max(0.0, self.decode_ms(requests) + excess_ms)
        if not chunks_ms:
            return decode_ms
        return max(decode_ms, prompts_ms + decode_ms * self.decode_beside_prompts)

    def _context_ms(self, tokens: float, attended_ms: float, scored_ms: float) -> float:
        """Milliseconds of a token with so much context, by those of a million tokens that are attended to, and of a
        million that are scored.
        """
        return (self.attended_tokens(tokens) * attended_ms + tokens * scored_ms) / MILLION

    def attended_tokens(self, context_tokens: float) -> float:
        """How many of the tokens before it a token attends to."""
        return context_tokens if self.selected_tokens is None else min(context_tokens, self.selected_tokens)

    def push_ms(self, size_bytes: float) -> float:
        return size_bytes / self.push_bytes_per_second * 1000
