"""The two sides of the comparison with transformers. Each times the same three things by its own means."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from transformers import DeepseekV3ForCausalLM
from transformers.generation.streamers import BaseStreamer

from engine.config import EngineConfig
from engine.engine import Engine
from engine.memory.free_memory import free_bytes
from engine.protocol.messages import Submit
from engine.runner.backend import ModelBackend
from engine.settings.device import Hardware, resolve
from mesh.domain.requests import TokenRequest
from mesh.domain.sampling import Sampling, StopConditions

Prompt = Sequence[int]


class Candidate(Protocol):
    """Something that generates greedily on the CPU in float32. All times are seconds of wall clock."""

    name: str

    def decode(self, prompt: Prompt, tokens: int) -> float:
        """Seconds from the first generated token to the last of `tokens`, with one request alone."""
        ...

    def in_turn(self, prompts: Sequence[Prompt], tokens: int) -> float:
        """Seconds to answer the prompts one after another with `tokens` each, from the start to the last token."""
        ...

    def prefill(self, prompt: Prompt) -> float:
        """Seconds from the start to the logits of the prompt's last token."""
        ...


class Deepmesh:
    """Our engine, driven in this process."""

    def __init__(self, model_dir: Path) -> None:
        self.name = "deepmesh"
        self._config = EngineConfig(model_dir=model_dir, device="cpu", prefix_cache=False, max_step_tokens=4096)
        hardware = Hardware(cuda_devices=0, free_memory_bytes=free_bytes(torch.device("cpu")))
        self._backend = ModelBackend(resolve(self._config, hardware))

    def decode(self, prompt: Prompt, tokens: int) -> float:
        stamps = self._run([prompt], tokens)
        return stamps[-1] - stamps[1]

    def in_turn(self, prompts: Sequence[Prompt], tokens: int) -> float:
        return sum(self.together([prompt], tokens) for prompt in prompts)

    def together(self, prompts: Sequence[Prompt], tokens: int) -> float:
        """As `in_turn`, but with all prompts at once."""
        stamps = self._run(prompts, tokens)
        return stamps[-1] - stamps[0]

    def prefill(self, prompt: Prompt) -> float:
        return self.together([prompt], 1)

    def _run(self, prompts: Sequence[Prompt], tokens: int) -> list[float]:
        """The clock's times before the first step and after each one."""
        engine = Engine(self._config, self._backend, time.monotonic)
        for key, prompt in enumerate(prompts):
            stop = StopConditions(tokens, ignore_eos=True)
            engine.submit(Submit(key, TokenRequest(f"request-{key}", list(prompt), Sampling(), stop)))
        stamps = [time.perf_counter()]
        while engine.has_work():
            engine.step()
            stamps.append(time.perf_counter())
        return stamps


class Transformers:
    """`generate` and `forward` of transformers: sdpa attention, its dynamic cache, and one way to compute experts."""

    def __init__(self, model_dir: Path, experts: str) -> None:
        self.name = f"transformers ({experts})"
        self._model = DeepseekV3ForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="sdpa", experts_implementation=experts
        ).eval()

    def decode(self, prompt: Prompt, tokens: int) -> float:
        stamps = self._generate(prompt, tokens)
        return stamps[-1] - stamps[1]

    def in_turn(self, prompts: Sequence[Prompt], tokens: int) -> float:
        return sum(stamps[-1] - stamps[0] for stamps in (self._generate(prompt, tokens) for prompt in prompts))

    @torch.inference_mode()
    def prefill(self, prompt: Prompt) -> float:
        started = time.perf_counter()
        self._model(torch.tensor([list(prompt)]), logits_to_keep=1, use_cache=True)
        return time.perf_counter() - started

    @torch.inference_mode()
    def _generate(self, prompt: Prompt, tokens: int) -> list[float]:
        clock = _Clock()
        self._model.generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            streamer=clock,
        )
        return clock.stamps


class _Clock(BaseStreamer):  # type: ignore[misc]
    """Notes the clock's time when the prompt is put in, and after each generated token."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.stamps.append(time.perf_counter())

    def end(self) -> None:
        pass
