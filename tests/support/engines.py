"""Engines over the oracle backend, and a record of their reports."""

import random
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from engine.backend import Launched
from engine.batch import Batch, Sample
from engine.config import EngineConfig
from engine.engine import Engine
from engine.oracle.backend import OracleBackend
from engine.oracle.config import OracleConfig
from engine.pace.step_times import StepTimes
from engine.protocol.messages import Output, StepResult, Submit
from engine.step.shape import StepShape
from mesh.domain.outputs import PromptLogprobs
from mesh.domain.requests import TokenRequest
from mesh.domain.sampling import Sampling, StopConditions
from mesh.domain.shares import ONE_TENANT

VOCABULARY = 500


def oracle_config(**settings: Any) -> EngineConfig:
    oracle = OracleConfig(**{"vocabulary_size": VOCABULARY, **settings.pop("oracle", {})})
    # Which tokens a step has must not depend on how long steps take on this machine.
    return EngineConfig(backend="oracle", oracle=oracle, **{"mixed_step_ms": None, **settings})


class DeferredOracle(OracleBackend):
    """Computes a batch only when it is collected, which is as late as a device may. This shows whether what the batch
    reads and writes is still there.
    """

    asynchronous = True

    def __init__(
        self,
        config: EngineConfig,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(config, clock, sleep)
        # Batches that were launched and not collected yet.
        self.uncollected: deque[DeferredBatch] = deque()

    def launch(self, batch: Batch, shape: StepShape) -> "DeferredBatch":  # type: ignore[override]
        assert len(self.uncollected) <= 1 and all(earlier.drawn for earlier in self.uncollected)
        # Copy the rows' block ids: they are the engine's own arrays, valid only during the launch.
        rows = [msgspec.structs.replace(row, block_ids=list(row.block_ids)) for row in batch.rows]
        self.uncollected.append(self.defer(Batch(batch.step, rows, batch.on_layers), shape))
        return self.uncollected[-1]

    def defer(self, batch: Batch, shape: StepShape) -> "DeferredBatch":
        return DeferredBatch(self, batch, shape)

    def compute(self, batch: Batch, shape: StepShape) -> Launched:
        launched = super().launch(batch, shape)
        launched.draw()
        return launched


class DeferredBatch:
    def __init__(self, backend: DeferredOracle, batch: Batch, shape: StepShape) -> None:
        self._backend = backend
        self._batch = batch
        self._shape = shape
        self.drawn = False

    def draw(self) -> None:
        assert not self.drawn
        self.drawn = True

    def collect(self) -> list[Sample | None]:
        assert self.drawn and self._backend.uncollected.popleft() is self
        self._computed = self._backend.compute(self._batch, self._shape)
        return self._computed.collect()

    def prompt_logprobs(self) -> Mapping[int, PromptLogprobs]:
        return self._computed.prompt_logprobs()


class LayeredDevice(DeferredOracle):
    """Reports one layer after another while a batch is waited for."""

    def defer(self, batch: Batch, shape: StepShape) -> "LayeredBatch":
        return LayeredBatch(self, batch, shape)


class LayeredBatch(DeferredBatch):
    def collect(self) -> list[Sample | None]:
        for layers in (1, 2):
            if self._batch.on_layers is not None:
                self._batch.on_layers(layers)
        return super().collect()


class Others:
    """Stands in for other ranks: they compute these numbers of tokens, one a step, and then do as this rank
    proposes.
    """

    due = False

    def __init__(self, tokens: Sequence[int]) -> None:
        self.proposals: list[StepShape] = []
        self._tokens = list(tokens)

    def agree(self, proposal: StepShape) -> StepShape:
        self.proposals.append(proposal)
        if not self._tokens:
            return proposal
        tokens = self._tokens.pop(0)
        tokens, decode_only = max(proposal.tokens, tokens), proposal.decode_only and tokens <= 1
        return msgspec.structs.replace(proposal, tokens=tokens, decode_only=decode_only, stopping=False)


def oracle_engine(
    *, ahead: bool = False, others: "Others | None" = None, step_times: StepTimes | None = None, **settings: Any
) -> Engine:
    """ahead: whether a step is launched before the one before is collected. others: ranks with which this one keeps
    step. step_times: those by which the engine chooses the number of drafts; None if it does not choose.
    """
    config = oracle_config(**{"overlap": "on" if ahead else "off", **settings})
    backend = DeferredOracle(config) if ahead else OracleBackend(config)
    backend.step_times = step_times
    return Engine(config, backend, time.monotonic, agreement=others)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCABULARY), k=length)


def submit_of(key: int, token_ids: Sequence[int], max_tokens: int, **settings: Any) -> Submit:
    """settings: fields of Submit, TokenRequest or StopConditions."""
    stop = StopConditions(max_tokens, settings.pop("stop_token_ids", ()), settings.pop("ignore_eos", False))
    request = TokenRequest(
        request_id=f"request-{key}",
        token_ids=list(token_ids),
        sampling=settings.pop("sampling", Sampling()),
        stop=stop,
        cache_salt=settings.pop("cache_salt", b""),
        attempt=settings.pop("attempt", 0),
        prompt_tokens=settings.pop("prompt_tokens", None),
        constraint=settings.pop("constraint", None),
        share=settings.pop("share", ONE_TENANT),
        sparse=settings.pop("sparse", None),
    )
    return Submit(key, request, **settings)


class Transcript:
    """All that an engine reports. Each report is checked: no position is skipped, and nothing follows the end."""

    def __init__(self) -> None:
        self.token_ids: dict[int, list[int]] = {}
        self.cached_tokens: dict[int, int] = {}
        self.logprobs: dict[int, list[Any]] = {}
        self.prompt_logprobs: dict[int, PromptLogprobs] = {}
        self.ends: dict[int, Output] = {}
        self.steps: list[StepResult] = []
        self._next_position: dict[int, int] = {}

    def record(self, result: StepResult | None) -> None:
        if result is None:
            return
        self.steps.append(result)
        for output in result.outputs:
            self._record_output(output)

    def record_first(self, first: Output) -> None:
        """Record the first token, which a prefill worker drew and the decode worker's service reports."""
        if first.key not in self.ends:
            self._record_output(first)

    def record_rest(self, result: StepResult | None) -> None:
        """Record the decode rank's reports after the first token. The rank may not have been told yet of that token, or
        that the request ended with it.
        """
        if result is None:
            return
        outputs = [
            output if output.token_ids else replace(output, first_position=self._position(output))
            for output in result.outputs
            if output.key not in self.ends
        ]
        self.record(replace(result, outputs=outputs))

    def _position(self, output: Output) -> int:
        return self._next_position.get(output.key, output.first_position)

    def run(self, engine: Engine) -> "Transcript":
        """Step until there is no work."""
        while engine.has_work():
            self.record(engine.step())
        return self

    def run_with_reads(self, engine: Engine) -> "Transcript":
        """Step until there is no work, and nothing is read from host memory: a GPU's copies end after the step that
        began them, and only polls notice.
        """
        while engine.has_work() or engine.transfers.open_reads:
            self.record(engine.step())
            engine.poll_transfers()
        return self

    def _record_output(self, output: Output) -> None:
        key = output.key
        assert key not in self.ends, "an output after the last"
        assert output.first_position == self._position(output)
        self._next_position[key] = output.first_position + len(output.token_ids)
        self.token_ids.setdefault(key, []).extend(output.token_ids)
        self.logprobs.setdefault(key, []).extend(output.logprobs or [])
        if output.cached_tokens is not None:
            assert key not in self.cached_tokens
            self.cached_tokens[key] = output.cached_tokens
        if output.prompt_logprobs is not None:
            assert key not in self.prompt_logprobs
            self.prompt_logprobs[key] = output.prompt_logprobs
        if output.finish or output.refusal:
            self.ends[key] = output


def assert_at_rest(engine: Engine) -> None:
    """Assert that nothing runs and that no block is held."""
    assert not engine.has_work()
    assert not any(engine.pool.references)
    assert engine.pool.free_blocks == engine.pool.total_blocks
    load = engine.load()
    assert (load.running_requests, load.waiting_requests, load.queued_prefill_tokens) == (0, 0, 0)
