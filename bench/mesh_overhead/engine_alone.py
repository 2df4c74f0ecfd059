"""Runs one engine in a process of its own, without a mesh around it, and notes when each of its tokens came.

`python -m bench.mesh_overhead.engine_alone TASK TIMES` reads an EngineTask and writes the times of its streams, both as
JSON.
"""

import gc
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from engine.config import EngineConfig
from engine.engine import Engine
from engine.protocol.messages import Submit
from engine.rank.backends import Backends
from mesh.domain.requests import TokenRequest
from mesh.domain.sampling import Sampling, StopConditions


class EngineTask(msgspec.Struct, frozen=True):
    """`engine` is an EngineConfig's values; every prompt is answered with `tokens` tokens."""

    engine: dict[str, Any]
    prompts: list[list[int]]
    tokens: int


def token_times(engine: Engine, prompts: Sequence[list[int]], tokens: int) -> list[list[float]]:
    """Submit all prompts at once; for each, when its tokens came, in seconds of time.perf_counter."""
    times: list[list[float]] = [[] for _ in prompts]
    for key, prompt in enumerate(prompts):
        stop = StopConditions(tokens, ignore_eos=True)
        engine.submit(Submit(key, TokenRequest(str(key), prompt, Sampling(), stop)))
    while engine.has_work():
        result = engine.step()
        now = time.perf_counter()
        for output in result.outputs if result is not None else ():
            assert output.refusal is None, output.refusal.message
            times[output.key].extend([now] * len(output.token_ids))
    return times


def main(arguments: Sequence[str]) -> int:
    task_path, times_path = map(Path, arguments)
    task = msgspec.json.decode(task_path.read_bytes(), type=EngineTask)
    config = EngineConfig.model_validate(task.engine)
    engine = Engine(config, Backends().make(config), time.monotonic)
    # As a rank does: the garbage collector need not visit what was loaded.
    gc.freeze()
    times_path.write_bytes(msgspec.json.encode(token_times(engine, task.prompts, task.tokens)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
