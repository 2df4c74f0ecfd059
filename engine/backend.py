"""What computes batches: a model on a device, the oracle, or a device in simulated time."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from engine.balance.report import BalanceReport
from engine.batch import Batch, Sample
from engine.moves.host_slots import HostSlots
from engine.pace.step_times import StepTimes
from engine.protocol.messages import SparseMeasure
from engine.requests.thinking import ThinkTokens
from engine.step.shape import StepShape, shape_of
from mesh.domain.kv_identity import KvNamespace
from mesh.domain.outputs import PromptLogprobs
from mesh.domain.workers import WorkerSpeed
from transfer.memory import KvMemory


class Launched(Protocol):
    """A step on its way through a backend."""

    def draw(self) -> None:
        """Draw the tokens of each row with sampling. To be called once, before the next launch.

        If a row has masks, and follows a row of the batch launched before, that batch is collected before this call.
        """
        ...

    def collect(self) -> list[Sample | None]:
        """Wait for the step. One entry per row, None where the row has no sampling."""
        ...

    def prompt_logprobs(self) -> Mapping[int, PromptLogprobs]:
        """What rows with `prompt_logprobs` report, by the row's index. To be called after `collect`."""
        ...


class Backend(Protocol):
    """What computes a batch. Owns the tensors of the KV pool; the engine owns which block is whose."""

    model: str
    namespace: KvNamespace
    context_tokens: int
    vocabulary_size: int
    total_blocks: int
    # One block of KV, all layers.
    block_bytes: int
    # How many layers of the KV only drafts need.
    draft_layers: int
    # The tokens that tell when the model thinks; None if drafts are accepted strictly.
    think_tokens: ThinkTokens | None
    # How long steps take with each number of drafts; None if the engine is not to choose that number.
    step_times: StepTimes | None
    # How fast steps were before any request came; None if that was not measured.
    speed: WorkerSpeed | None
    eos_token_ids: frozenset[int]
    # Whether the device computes while the host does other things.
    asynchronous: bool
    # The device's name: a card's, "CPU" or "oracle".
    device_name: str

    @property
    def captured_rows(self) -> int:
        """The most decode rows of a step that is captured as a graph; 0 if no step is."""
        ...

    @property
    def captured_prompt_tokens(self) -> int:
        """The most tokens of a step with prompts that is captured, except for attention of prompts; 0 if none is."""
        ...

    @property
    def balance(self) -> BalanceReport | None:
        """How evenly the ranks share the experts' load; None if experts stay where they are."""
        ...

    def drain_sparse_measures(self) -> Sequence[SparseMeasure]:
        """Samples of how much sparse attention kept, from steps since the last call. Does not wait for any step."""
        ...

    def kv_memory(self) -> KvMemory:
        """The KV pool as transfers see it."""
        ...

    def host_slots(self) -> HostSlots | None:
        """Host memory for blocks that the pool evicts; None if there is to be none, or if it cannot be had.
        To be called once, by the engine.
        """
        ...

    def clear_drafts(self, block_ids: Sequence[int]) -> None:
        """Empty the draft layers of blocks that no step in flight uses. Steps launched later find them empty."""
        ...

    def launch(self, batch: Batch, shape: StepShape) -> Launched:
        """Begin to compute the batch's tokens, after the batch launched before. Rows may follow rows of that batch.

        The step has the agreed shape, which is no smaller than the batch. A batch without rows is a dummy: the rank
        computes padding while other ranks compute rows, and touches no block of a request. At most one batch is not
        collected yet when another is launched; batches are collected in order.
        """
        ...


def execute(backend: Backend, batch: Batch, shape: StepShape | None = None) -> list[Sample | None]:
    """Compute one batch from its launch to its samples, by default in a step of its own shape."""
    launched = backend.launch(batch, shape or shape_of(batch.rows))
    launched.draw()
    return launched.collect()
