"""Engines whose answers can be constrained, over a small checkpoint with random weights."""

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from engine.config import EngineConfig
from engine.constraints.constraints import load_constraints
from engine.engine import Engine
from engine.protocol.messages import Submit
from engine.runner.backend import ModelBackend
from tests.support.checkpoints import model_backend
from tests.support.engines import Transcript

COMPILED_SECONDS = 30


class ConstrainedEngine:
    """An engine, and a way to wait for the grammars that it compiles."""

    def __init__(self, checkpoint: Path, backend: ModelBackend | None = None, **settings: Any) -> None:
        """backend: one over the same checkpoint and with the same settings; made here if None."""
        settings = {"max_step_tokens": 96, "max_requests": 8, "total_blocks": 64, **settings}
        config = EngineConfig(model_dir=checkpoint, **settings)
        backend = backend or model_backend(checkpoint, **settings)
        self._compiled = threading.Semaphore(0)
        constraints = load_constraints(config, backend.vocabulary_size, backend.eos_token_ids, self._compiled.release)
        self._made = config, backend, constraints
        self.engine = Engine(config, backend, time.monotonic, constraints=constraints)

    def begin_again(self) -> None:
        """Make a new engine over the same backend, as a process does when its role changes."""
        config, backend, constraints = self._made
        self.engine = Engine(config, backend, time.monotonic, constraints=constraints.successor())

    def submit(self, *submits: Submit) -> None:
        """Submit requests; returns once their grammars are compiled."""
        for submit in submits:
            self.engine.submit(submit)
            if submit.request.constraint is not None:
                assert self._compiled.acquire(timeout=COMPILED_SECONDS)

    def run(self, *submits: Submit) -> Transcript:
        self.submit(*submits)
        return Transcript().run(self.engine)


class Texts:
    """Translates between texts and token ids."""

    def __init__(self, checkpoint: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

    def ids(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return token_ids

    def of(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text
