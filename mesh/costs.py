"""What work costs a worker: the one model of time that placement, scaling, the simulator and `deepmesh plan` share."""

from bisect import bisect_left

import msgspec

MILLION = 1e6


class CostModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Times of one kind of worker. The defaults are what is assumed of a worker that nobody has measured."""

    # Requests in a decode step, ascending, and milliseconds of that step; linear between them and behind the last.
    decode_steps: tuple[tuple[float, float], ...] = ((1.0, 20.0), (51.0, 39.607843137254903))
    # Context of each request in these steps, and milliseconds that a million tokens of context more take.
    decode_context_tokens: float = 0.0
    decode_context_ms: float = 0.0
    # What decoding adds to a step with prompts, as a share of its own step: a GPU reads the weights once for both.
    decode_beside_prompts: float = 1.0
    # Prompts without what came before them, and milliseconds of a million pairs of a prompt's token and one before it.
    prefill_tokens_per_second: float = 5000.0
    prefill_pairs_ms: float = 0.0
    # What a rank's prompts take if no other rank of its worker computes any, as a share of that if all compute as many.
    prefill_alone: float = 1.0
    # What a step with prompts takes besides their tokens, as weights are read and the host launches it.
    prefill_step_ms: float = 0.0
    # The same of tokens whose attention is sparse; null: as if it were exact, until workers measure it.
    sparse_pairs_ms: float | None = None
    # A push of KV to a decode worker: rate, and time of the calls, from the decode worker's landing to the prefill
    # worker's first chunk, and from the last byte of KV to the decode worker's next step.
    push_bytes_per_second: float = 2e9
    handover_ms: float = 5.0
    # A fetch from a store: time before its first byte, and its rate from the store's memory and from its disk.
    fetch_latency_ms: float = 2.0
    fetch_bytes_per_second: float = 1e9
    disk_fetch_bytes_per_second: float = 5e8
    # What a request spends in gateway and scheduler until a worker has it, and its first token on the way back.
    request_ms: float = 0.0
    # From the decision to start a worker until it takes requests.
    start_seconds: float = 60.0

    def __post_init__(self) -> None:
        requests = [at for at, _ in self.decode_steps]
        if not requests or requests != sorted(set(requests)) or requests[0] <= 0:
            raise ValueError("decode_steps needs at least one point, with requests ascending from above 0")
        transfers = (self.push_bytes_per_second, self.fetch_bytes_per_second, self.disk_fetch_bytes_per_second)
        if min(ms for _, ms in self.decode_steps) <= 0 or min(self.prefill_tokens_per_second, *transfers) <= 0:
            raise ValueError("times of steps and rates must be above 0")

    def decode_ms(self, requests: float) -> float:
        """A step in which so many requests decode, at the context that was measured."""
        points = self.decode_steps
        if requests <= points[0][0] or len(points) == 1:
            return points[0][1]
        # Placement asks for each worker: most models have two points.
        after = 1 if len(points) == 2 else min(max(bisect_left(points, (requests,)), 1), len(points) - 1)
        (left, low), (right, high) = points[after - 1], points[after]
        return low + (high - low) * (requests - left) / (right - left)

    def requests_within(self, ms: float, most: int) -> int:
        """The largest number of requests, at most `most`, whose step takes no longer than `ms`; 0 if none does."""
        return bisect_left(range(1, most + 1), True, key=lambda requests: self.decode_ms(requests) > ms)

    def prefill_ms(self, tokens: float, cached_tokens: float = 0.0) -> float:
        """Computing `tokens` of a prompt behind `cached_tokens` of it."""
        return tokens * self.prompt_token_ms(cached_tokens + tokens / 2)

    def sparse_prefill_ms(self, tokens: float, cached_tokens: float = 0.0) -> float:
        """The same with sparse attention of all of them."""
        return tokens * self.prompt_token_ms(cached_tokens + tokens / 2, sparse=True)

    def prompt_token_ms(self, context_tokens: float, sparse: bool = False) -> float:
        """One token of a prompt that has so many before it."""
        pairs_ms = self.prefill_pairs_ms
        if sparse and self.sparse_pairs_ms is not None:
            pairs_ms = self.sparse_pairs_ms
        return 1000 / self.prefill_tokens_per_second + context_tokens / MILLION * pairs_ms

    def step_ms(self, requests: int, context_tokens: int, chunks_ms: float) -> float:
        """A step in which requests with so much context together decode, beside chunks of prompts. However short these
        are, it takes as long as one without them.
        """
        prompts_ms = chunks_ms + self.prefill_step_ms if chunks_ms else 0.0
        if not requests:
            return prompts_ms
        excess = context_tokens - requests * self.decode_context_tokens
        decode_ms = max(0.0, self.decode_ms(requests) + excess / MILLION * self.decode_context_ms)
        if not chunks_ms:
            return decode_ms
        return max(decode_ms, prompts_ms + decode_ms * self.decode_beside_prompts)

    def push_ms(self, size_bytes: float) -> float:
        return size_bytes / self.push_bytes_per_second * 1000


class CostFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A calibrated cost model, what it was calibrated on, and how far it is off."""

    costs: CostModel
    # What was measured, in words.
    device: str = ""
    model: str = ""
    # How the worker's ranks share the model, and its number formats, e.g. "ep8" and "fp8, bf16 KV".
    layout: str = ""
    format: str = ""
    source: str = ""
    # Largest relative difference between a measurement and the model without it; None if there were too few to tell.
    error: float | None = None
