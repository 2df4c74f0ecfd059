"""A fake rank that does what a test says, and submissions with plain defaults."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from engine.protocol.messages import FirstToken, Output, Ready, StepResult, Submit
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.outputs import FinishReason, Logprobs
from mesh.domain.requests import Submission, TokenRequest
from mesh.domain.sampling import Sampling, StopConditions
from mesh.domain.sparse_prefill import SparsePrefill
from mesh.domain.targets import WorkerTarget
from mesh.domain.workers import WorkerLoad
from mesh.errors import EngineFailed

LOAD = WorkerLoad(0, 0, 0, 100)
READY = Ready(
    model="oracle",
    namespace=KvNamespace("fingerprint", "oracle", 1, "oracle:1"),
    context_tokens=1000,
    vocabulary_size=100,
    total_blocks=100,
    block_bytes=512,
    max_requests=4,
    peak_bytes=0,
)


PREFILL = WorkerTarget("prefill-1", "first", "127.0.0.1:1")


def make_submission(stream_id: int = 1, **changes: Any) -> Submission:
    """changes: fields of Submission, TokenRequest or StopConditions."""
    stop = StopConditions(changes.pop("max_tokens", 10), changes.pop("stop_token_ids", ()))
    of_request = {name: changes.pop(name) for name in TokenRequest.__struct_fields__ if name in changes}
    request = TokenRequest(f"r{stream_id}", [1, 2, 3], Sampling(), stop)
    return Submission(stream_id, replace(request, **of_request), **changes)


@dataclass
class FakePrompts:
    """Stands in for remote prompts: notes which requests wait for one, by the rank's key, and computes none."""

    expected: dict[int, Submission] = field(default_factory=dict)

    def expect(self, key: int, submission: Submission) -> None:
        assert key not in self.expected
        self.expected[key] = submission

    def drop(self, key: int) -> None:
        self.expected.pop(key, None)


@dataclass
class FakeRank:
    """Computes nothing: `step` makes the results that a test asks for."""

    submitted: dict[int, Submit] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)
    # Tokens generated for each request that has not ended.
    running: dict[int, int] = field(default_factory=dict)
    dead: bool = False
    steps: int = 0

    def new_key(
        self,
        token_ids: Sequence[int],
        cache_salt: bytes,
        computes_prompt: bool,
        sparse: SparsePrefill | None = None,
        booked: int | None = None,
    ) -> int:
        return len(self.submitted)

    def submit(self, submit: Submit) -> None:
        if self.dead:
            raise EngineFailed("the engine process has ended")
        self.submitted[submit.key] = submit
        self.running[submit.key] = 0

    def cancel(self, key: int) -> None:
        if self.dead:
            raise EngineFailed("the engine process has ended")
        self.cancelled.append(key)

    def first_token(self, first: FirstToken) -> None:
        if self.dead:
            raise EngineFailed("the engine process has ended")
        assert self.running[first.key] == 0, "a second first token"
        self.running[first.key] = 1

    def tokens(self, key: int, start: int, count: int) -> list[int]:
        """The tokens at those indices of a request's completion."""
        return [1000 * key + index for index in range(start, start + count)]

    def output(
        self, key: int, count: int = 1, finish: str | None = None, logprobs: list[Logprobs] | None = None
    ) -> Output:
        start = self.running[key]
        if finish is None:
            self.running[key] += count
        else:
            del self.running[key]
        prompt_tokens = len(self.submitted[key].request.token_ids)
        cached_tokens = 0 if start == 0 and count else None
        tokens = self.tokens(key, start, count)
        reason = None if finish is None else FinishReason(finish)
        return Output(key, prompt_tokens + start, tokens, logprobs, cached_tokens, reason)

    def step(self, *outputs: Output) -> StepResult:
        self.steps += 1
        return StepResult(self.steps, list(outputs), LOAD)
