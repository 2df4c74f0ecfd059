"""How fast the engine has been going."""

from collections.abc import Sequence

from engine.prompt_pace import NO_PROMPTS, PromptPaceMeter, PromptTokens
from engine.smoothing import SmoothedRatio
from mesh.domain.workers import WorkerLoad

# Weight of the past against one more step, and against one more finished request.
STEP_DECAY = 0.98
REQUEST_DECAY = 0.95
PUSH_DECAY = 0.9
# The time of a smaller push is mostly its way there and back.
LEAST_PUSH_BYTES = 1 << 20
# A step of less than 20 ms weighs as much as its share of this time. Otherwise a single short step that the machine
# held up would dominate a mean over dozens.
STEP_MEMORY_SECONDS = 1.0


class LoadMeter:
    """Smooths what steps, finished requests and pushes report.

    Steps with both count for both, so that the rates of decode and of prompts include what each does to the other.
    """

    def __init__(self) -> None:
        self._prefill_tokens_per_second = SmoothedRatio()
        self._prompt_paces = PromptPaceMeter()
        self._decode_step_ms = SmoothedRatio()
        self._decode_step_requests = SmoothedRatio()
        self._output_tokens = SmoothedRatio()
        self._push_bytes_per_second = SmoothedRatio()

    def observe_step(
        self,
        seconds: float,
        decoding: int,
        prompts: PromptTokens = NO_PROMPTS,
        accepted_drafts: int = 0,
        beside: int = 0,
    ) -> None:
        """A step in which `decoding` requests drew a token each, and behind them `accepted_drafts` tokens in all.

        beside: how many tokens of prompts were computed as if they were requests that decode.
        """
        decay = _step_decay(seconds)
        if prompts.all:
            self._prefill_tokens_per_second.observe(prompts.all, seconds, decay)
            self._prompt_paces.observe(prompts, seconds, decay)
        if decoding:
            # A step counts as many times as it brought each request a token.
            self._decode_step_ms.observe(seconds * 1000.0, 1.0 + accepted_drafts / decoding, decay)
            self._decode_step_requests.observe(decoding + beside, 1.0, decay)

    def observe_decode_steps(self, seconds: Sequence[float], decoding: int) -> None:
        """Steps one after the other, in each of which these requests drew a token each, and nothing else happened."""
        floor, memory = STEP_DECAY, STEP_MEMORY_SECONDS
        # The same as `_step_decay`, without a call for each step.
        decays = [floor if (decay := 1.0 - each / memory) < floor else decay for each in seconds]
        self._decode_step_ms.observe_all([each * 1000.0 for each in seconds], 1.0, decays)
        self._decode_step_requests.observe_equal(decoding, 1.0, decays)

    def observe_finished(self, output_tokens: int) -> None:
        self._output_tokens.observe(output_tokens, 1.0, REQUEST_DECAY)

    def observe_push(self, size_bytes: int, seconds: float) -> None:
        if size_bytes >= LEAST_PUSH_BYTES:
            self._push_bytes_per_second.observe(size_bytes, seconds, PUSH_DECAY)

    def load(
        self,
        running: int,
        waiting: int,
        queued_prefill_tokens: int,
        free_blocks: int,
        queued_sparse_tokens: int = 0,
        waiting_blocks: int = 0,
    ) -> WorkerLoad:
        return WorkerLoad(
            running_requests=running,
            waiting_requests=waiting,
            queued_prefill_tokens=queued_prefill_tokens,
            free_blocks=free_blocks,
            prefill_tokens_per_second=self._prefill_tokens_per_second.value,
            decode_step_ms=self._decode_step_ms.value,
            mean_output_tokens=self._output_tokens.value,
            decode_step_requests=self._decode_step_requests.value,
            push_bytes_per_second=self._push_bytes_per_second.value,
            exact_prompts=self._prompt_paces.exact,
            sparse_prompts=self._prompt_paces.sparse,
            queued_sparse_tokens=queued_sparse_tokens,
            waiting_blocks=waiting_blocks,
        )


def _step_decay(seconds: float) -> float:
    return max(STEP_DECAY, 1.0 - seconds / STEP_MEMORY_SECONDS)
