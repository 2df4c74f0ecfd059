"""Shows the service that this rank makes progress."""

import threading
from typing import TYPE_CHECKING

from engine.config import EngineConfig
from engine.protocol.pulse import LoopProgress, Pulse

if TYPE_CHECKING:
    from transfer.agent import TransferAgent

BEAT_SECONDS = 0.25
# A step on the CPU takes as long as the machine's other work lets it. The longest on a GPU is the last chunk of a
# prompt of 128k tokens.
LONGEST_CPU_STEP_SECONDS = 60.0
LONGEST_GPU_STEP_SECONDS = 30.0


class Heartbeat:
    """A thread that publishes how many passes the step loop and the transfer thread have made.

    The thread beats while a step computes, too, so that a stopped process differs from one in a long step.
    """

    def __init__(self, pulse: Pulse, agent: "TransferAgent | None", longest_step_seconds: float) -> None:
        self._pulse = pulse
        self._agent = agent
        self._longest_step_ms = int(longest_step_seconds * 1000)
        self._step_loop_passes = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        self._thread.join()

    def note_work(self) -> None:
        """The step loop begins to work."""
        assert self._step_loop_passes % 2 == 0
        self._step_loop_passes += 1

    def note_wait(self) -> None:
        """The step loop has done its work, and waits for more."""
        assert self._step_loop_passes % 2 == 1
        self._step_loop_passes += 1

    def _beat(self) -> None:
        beats = 0
        while True:
            beats += 1
            transfer_passes = 0 if self._agent is None else self._agent.passes
            self._pulse.write(LoopProgress(beats, self._step_loop_passes, transfer_passes, self._longest_step_ms))
            if self._stopping.wait(BEAT_SECONDS):
                return


def longest_step_seconds(config: EngineConfig, on_gpu: bool) -> float:
    """The longest step that a rank of this configuration announces."""
    if config.backend == "model":
        return LONGEST_GPU_STEP_SECONDS if on_gpu else LONGEST_CPU_STEP_SECONDS
    rate = config.oracle.prefill_tokens_per_second
    return config.oracle.step_ms / 1000 + (config.max_step_tokens / rate if rate else 0.0)
