"""Load for one engine in this process: requests whose prompts are cached already, and prompts that are not."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count, pairwise, product

import torch

from engine.backend import Backend
from engine.engine import Engine
from engine.model.context import DeviceState
from engine.protocol.messages import Cancel, SparseMeasure, Submit
from kernels.index_keys import SCALE_BYTES, write_keys
from mesh.blocks import BLOCK_TOKENS, HASH_BYTES, chain_hashes
from mesh.domain.requests import TokenRequest
from mesh.domain.sampling import Sampling, StopConditions
from mesh.domain.sparse_prefill import SparsePrefill

# Index keys that are drawn at a time.
TOKENS_TOGETHER = 1 << 16


class RankLoad:
    """Attributes:
    tokens: how many tokens requests have got so far in timed steps.
    verified: how many drafts were verified for them.
    sparse: the engine's measurements of sparse prompts.
    """

    def __init__(self, engine: Engine, backend: Backend) -> None:
        self._engine = engine
        self._backend = backend
        self._random = random.Random(0)
        self._keys: Iterator[int] = iter(range(1 << 30))
        self.tokens = self.verified = 0
        self.sparse: list[SparseMeasure] = []

    def start_decoding(self, requests: int, context: int, tokens: int) -> None:
        """Start requests that decode after `context` tokens. Their KV is whatever the pool happens to hold."""
        prompts = [self.prompt(context // BLOCK_TOKENS * BLOCK_TOKENS + 1) for _ in range(requests)]
        for prompt in prompts:
            self.pretend_cached(prompt)
        for prompt in prompts:
            self.submit(prompt, tokens)

    def decode_seconds(self, steps: int, before: Callable[[int], None] | None = None) -> list[float]:
        """Seconds of each of the next `steps` steps as a client would see them, from one token to the next. before:
        called before each step of the engine, with its number.
        """
        times = [time.perf_counter()]
        for number in count():
            if len(times) > steps:
                break
            if before is not None:
                before(number)
            result = self._engine.step()
            if result is not None and result.outputs:
                self.tokens += sum(len(output.token_ids) for output in result.outputs)
                self.verified += 0 if result.drafts is None else sum(result.drafts.verified)
                times.append(time.perf_counter())
        return [later - earlier for earlier, later in pairwise(times)]

    def churn(self, requests: int, prompt_tokens: int, tokens: int, steps: int) -> None:
        """Take `steps` steps with short requests, each replaced by another when it ends."""
        for _ in range(steps):
            while self._engine.load().running_requests + self._engine.load().waiting_requests < requests:
                self.submit(self.prompt(prompt_tokens), tokens)
            self._engine.step()
        self.drain()

    def drain(self) -> None:
        while self._engine.has_work():
            result = self._engine.step()
            if result is not None:
                self.sparse += result.sparse

    def prefill_seconds(self, prompts: int, tokens: int, sparse: SparsePrefill | None = None) -> float:
        """Seconds until all of these prompts, none of which is cached, have their first token."""
        for _ in range(prompts):
            self.submit(self.prompt(tokens), 1, sparse)
        started = time.perf_counter()
        self.drain()
        return time.perf_counter() - started

    def start_prompt(self, tokens: int, cached: int) -> int:
        """Submit a prompt whose first tokens are cached. Returns its key, by which it can be cancelled."""
        prompt = self.prompt(tokens)
        self.pretend_cached(prompt[:cached])
        return self.submit(prompt, 1)

    @property
    def prompt_tokens_left(self) -> int:
        return self._engine.load().queued_prefill_tokens

    def cancel(self, key: int) -> None:
        self._engine.cancel(Cancel(key))

    def prompt(self, tokens: int) -> list[int]:
        return self._random.choices(range(self._backend.vocabulary_size), k=tokens)

    def pretend_cached(self, prompt: list[int]) -> None:
        self._take_in(chain_hashes(prompt))

    def land(self, blocks: int) -> None:
        """Have the pool take in as many blocks, whose content is new, and evict others for them if it is full."""
        self._take_in([self._random.randbytes(HASH_BYTES) for _ in range(blocks)])

    def _take_in(self, hashes: Sequence[bytes]) -> None:
        pool = self._engine.pool
        blocks = pool.allocate(len(hashes))
        for block, content in zip(blocks, hashes, strict=True):
            pool.register(block, content)
        pool.release(blocks)

    def submit(self, prompt: list[int], max_tokens: int, sparse: SparsePrefill | None = None) -> int:
        """Returns the request's key."""
        key = next(self._keys)
        stop = StopConditions(max_tokens, ignore_eos=True)
        self._engine.submit(Submit(key, TokenRequest(str(key), prompt, Sampling(), stop, sparse=sparse)))
        return key


def fill_pool(state: DeviceState) -> None:
    """Fill the pool with random latents of unit variance, since on zeros attention would be faster than in practice,
    and with random index keys, since of equal ones the first would be selected.
    """
    # Fill a layer at a time to bound the memory of the random numbers.
    for layer in state.kv_pool:
        layer.copy_(torch.randn(layer.shape, dtype=torch.bfloat16, device=state.device))
    every = torch.arange(state.kv_pool.shape[1] * BLOCK_TOKENS, device=state.device)
    for keys, slots in product(() if state.index_pool is None else state.index_pool, every.split(TOKENS_TOGETHER)):
        width = keys.shape[2] - (SCALE_BYTES if keys.dtype == torch.uint8 else 0)
        norm = torch.ones(width, device=state.device)
        turns = torch.ones(len(slots), 1, dtype=torch.complex64, device=state.device)
        drawn = torch.randn(len(slots), width, device=state.device)
        write_keys(drawn, norm, torch.zeros_like(norm), turns, slots, keys, interleaved=False)
