"""How fast the engine has been going."""

from mesh.workers import WorkerLoad

# Weight of the past against one more step, and against one more finished request.
STEP_DECAY = 0.98
REQUEST_DECAY = 0.95


class _SmoothedRatio:
    """A quotient of two exponentially decayed sums, so that small observations weigh little. 0 while unknown."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._numerator = 0.0
        self._denominator = 0.0

    def observe(self, numerator: float, denominator: float) -> None:
        self._numerator = self._numerator * self._decay + numerator
        self._denominator = self._denominator * self._decay + denominator

    @property
    def value(self) -> float:
        return self._numerator / self._denominator if self._denominator else 0.0


class LoadMeter:
    """Smooths what steps and finished requests report, as they are met with: prefill beside decode and vice versa."""

    def __init__(self) -> None:
        self._prefill_tokens_per_second = _SmoothedRatio(STEP_DECAY)
        self._decode_step_ms = _SmoothedRatio(STEP_DECAY)
        self._output_tokens = _SmoothedRatio(REQUEST_DECAY)

    def observe_step(self, seconds: float, decoding: int, prompt_tokens: int) -> None:
        if prompt_tokens:
            self._prefill_tokens_per_second.observe(prompt_tokens, seconds)
        if decoding:
            self._decode_step_ms.observe(seconds * 1000.0, 1.0)

    def observe_finished(self, output_tokens: int) -> None:
        self._output_tokens.observe(output_tokens, 1.0)

    def load(self, running: int, waiting: int, queued_prefill_tokens: int, free_blocks: int) -> WorkerLoad:
        return WorkerLoad(
            running_requests=running,
            waiting_requests=waiting,
            queued_prefill_tokens=queued_prefill_tokens,
            free_blocks=free_blocks,
            prefill_tokens_per_second=self._prefill_tokens_per_second.value,
            decode_step_ms=self._decode_step_ms.value,
            mean_output_tokens=self._output_tokens.value,
        )
